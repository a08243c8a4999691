"""The engine in a process of its own that is killed in mid-course, as in production."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import psutil

from engine.client import EngineState
from engine.config import EngineConfig
from engine.outcome import FinishReason
from engine.process import ProcessClient
from engine.request import Request
from tests.engine.listener import RecordingListener
from tests.fidelity.judge import Reference, Row, difference
from tests.fidelity.settings import Setting

PATIENCE_S = 600.0


def run_restart(
    setting: Setting, config: EngineConfig, share: Seq[Request], wants: Mapping[str, Reference]
) -> Row:
    """All of `share` at once; when half has ended the process is killed, and the rest asked again.

    What was cut off must be the beginning of its reference.
    """
    row = Row(setting.name, setting.axes)
    config = replace(config, draft=setting.drafts, max_seqs=setting.batch[1])
    listener = RecordingListener()
    client = ProcessClient(config, listener)
    client.start()
    started = time.monotonic()
    try:
        listener.wait_for_state(EngineState.READY, seconds=PATIENCE_S)
        names = [r.id for r in share]
        for request in share:
            client.submit(replace(request, arrived=time.monotonic()))
        listener.wait(
            lambda: sum(map(listener._ended, names)) >= len(names) // 2, seconds=PATIENCE_S
        )
        assert client.pid is not None
        psutil.Process(client.pid).kill()
        listener.wait_for_ends(names, seconds=PATIENCE_S)
        listener.wait_for_state(EngineState.READY, times=2, seconds=PATIENCE_S)
        cut = [r for r in share if listener.finish(r.id).reason is FinishReason.ERROR]
        row.cancelled = len(cut)
        again = [replace(r, id=f"{r.id} again", arrived=time.monotonic()) for r in cut]
        for request in again:
            client.submit(request)
        listener.wait_for_ends([r.id for r in again], seconds=PATIENCE_S)
    finally:
        client.stop()
    row.seconds = time.monotonic() - started
    for request in [r for r in share if r not in cut] + again:
        _judge(row, request, tuple(listener.tokens(request.id)), wants, whole=True)
    for request in cut:
        _judge(row, request, tuple(listener.tokens(request.id)), wants, whole=False)
    row.idle = [] if 0 < len(cut) < len(share) else ["the end of the process cut nothing off"]
    return row


def _judge(
    row: Row,
    request: Request,
    got: tuple[int, ...],
    wants: Mapping[str, Reference],
    *,
    whole: bool,
) -> None:
    want = wants[request.id.removesuffix(" again")].tokens
    if whole:
        row.comparisons += 1
        row.greedy += request.sampling.temperature == 0
        row.count_rules(request)
        row.tokens += len(got)
    else:
        want = want[: len(got)]
    if got != want:
        row.differences.append(difference(request.id, "token", got, want))
