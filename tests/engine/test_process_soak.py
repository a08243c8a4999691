"""Fifty crashes in a row under load: every stream ends, and nothing piles up. `make soak`."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

from engine.client import EngineState
from engine.outcome import FinishReason
from tests.engine import children
from tests.engine.children import config_of, gone, running

KILLS = 50
TOKENS = 24


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_under_load(tmp_path: Path) -> None:
    model = children.write_model(tmp_path)
    want = children.reference(model, TOKENS)
    with running(config_of(model)) as world:
        world.start()
        me, pids, slowest = psutil.Process(), [world.child.pid], 0.0
        rss: list[int] = []
        fds = threads = 0
        for number in range(KILLS):
            names = world.load(16)
            world.child.kill()
            start = time.monotonic()
            world.listener.wait_for_ends(names, seconds=2.0)
            slowest = max(slowest, time.monotonic() - start)
            for name in names:
                finish = world.listener.finish(name)
                assert (finish.reason, finish.retryable) == (FinishReason.ERROR, True)
            world.listener.wait_for_state(EngineState.READY, number + 2)
            pids.append(world.child.pid)
            assert world.outputs(TOKENS) == want
            world.listener.chunks.clear()
            world.listener.reports.clear()
            rss.append(me.memory_info().rss)
            if number == 4:
                fds, threads = me.num_fds(), threading.active_count()
        assert len(set(pids)) == KILLS + 1
        assert (me.num_fds(), threading.active_count()) == (fds, threads)
        assert rss[-1] - rss[4] < 4 << 20
        print(f"slowest end of all streams after a kill: {slowest * 1000:.0f} ms")
    assert all(gone(pid, 0.1) for pid in pids)
