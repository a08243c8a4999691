"""The engine in a child process: whatever happens to the child, every request gets one end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.client import EngineState
from engine.errors import EngineDead, InvalidRequest
from engine.outcome import FinishReason
from engine.process import Supervision
from tests.engine import children
from tests.engine.children import PROMPTS, World, config_of, gone, running

PARENT = """
import sys, threading
from engine.config import EngineConfig
from engine.process import ProcessClient

class Listener:
    def deliver(self, chunks): ...
    def report(self, report): ...
    def changed(self, state, info, cause): print(client.pid, flush=True)

client = ProcessClient(EngineConfig(model=sys.argv[1], dtype="float32", threads=1), Listener())
client.start()
threading.Event().wait()
"""
TOKENS = 24
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return children.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    return children.reference(model, TOKENS)


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[World]:
    """One child for all that leaves it as it was, or lets it be replaced."""
    with running(config_of(model)) as world:
        yield world.start()


def test_ready_tells_about_the_model(shared: World, model: Path) -> None:
    (state, info, cause), *_ = shared.listener.states
    assert (state, cause, shared.client.state) == (EngineState.READY, "", EngineState.READY)
    assert info is not None
    assert (info.architecture, info.directory) == ("LlamaForCausalLM", str(model))
    assert (info.vocab_size, info.context_limit, info.eos_ids) == (420, 8192, (2,))
    assert (info.dtype, info.device, info.draft_sources) == ("float32", "cpu", ("grammar", "ngram"))
    assert info.kv_capacity_tokens == children.KV_MIB * children.TOKENS_PER_MIB
    assert len(info.fingerprint) == 32


def test_generations_are_those_of_an_engine_in_this_process(
    shared: World, reference: list[list[int]]
) -> None:
    assert shared.outputs(TOKENS) == reference
    assert len(shared.listener.reports) > 0


def test_cancelling(shared: World) -> None:
    name = shared.load(1)[0]
    shared.client.cancel("nobody")
    shared.client.cancel(name, FinishReason.REPLACED)
    shared.listener.wait_for_ends([name])
    assert shared.listener.finish(name).reason is FinishReason.REPLACED
    assert 0 < len(shared.listener.tokens(name)) < children.LONG
    shared.client.cancel(name)


def test_a_live_id_is_refused(shared: World) -> None:
    name = shared.load(1)[0]
    with pytest.raises(InvalidRequest, match="already live"):
        shared.client.submit(children.request(name, [5], 3))
    shared.client.cancel(name)
    shared.listener.wait_for_ends([name])
    assert shared.listener.finish(name).reason is FinishReason.CANCELLED


def test_a_prompt_of_a_million_tokens_holds_nobody_up(shared: World) -> None:
    """Not even while the child does not read."""
    shared.child.send_signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        huge = [shared.submit([7] * 1_000_000, 5) for _ in range(3)]
        small = shared.submit(PROMPTS[0], 5)
        took = time.monotonic() - start
    finally:
        shared.child.send_signal(signal.SIGCONT)
    shared.listener.wait_for_ends([*huge, small])
    assert took < 2.0
    assert all("context" in shared.listener.finish(n).error for n in huge)
    assert shared.listener.finish(small).reason is FinishReason.LENGTH


def test_signals_meant_for_others_do_not_end_it(shared: World) -> None:
    """An interrupt from the terminal reaches the whole group; SIGUSR1 asks for its stacks."""
    pid = shared.client.pid
    shared.child.send_signal(signal.SIGINT)
    shared.child.send_signal(signal.SIGUSR1)
    name = shared.submit(PROMPTS[0], 5)
    shared.listener.wait_for_ends([name])
    assert shared.listener.finish(name).reason is FinishReason.LENGTH
    assert shared.client.pid == pid


def test_memory_is_given_back(shared: World) -> None:
    """Once the whole pool has been used; its pages are counted when they are first written."""
    capacity = children.KV_MIB * children.TOKENS_PER_MIB
    names = [shared.submit([7] * 4000, 1) for _ in range(capacity // 4000 + 1)]
    shared.listener.wait_for_ends(names)

    def round_of_work() -> int:
        for _ in range(4):
            names = [shared.submit([5 + i] * (1 + 9 * i), 40, i) for i in range(16)]
            for name in names[::3]:
                shared.client.cancel(name)
            shared.listener.wait_for_ends(names)
        return int(shared.child.memory_info().rss)

    round_of_work()
    before = round_of_work()
    assert round_of_work() - before < 4 << 20


def test_idle_is_not_hanging(shared: World) -> None:
    pid, states = shared.client.pid, len(shared.listener.states)
    shared.clock.ahead += 1000.0
    name = shared.submit(PROMPTS[0], 5)
    shared.listener.wait_for_ends([name])
    shared.clock.ahead += 1000.0
    name = shared.submit(PROMPTS[0], 5)
    shared.listener.wait_for_ends([name])
    assert (shared.client.pid, len(shared.listener.states)) == (pid, states)


def test_killed_under_load_three_times(shared: World, reference: list[list[int]]) -> None:
    ready = shared.count(EngineState.READY)
    fds = psutil.Process().num_fds()
    for number in range(3):
        names, child = shared.load(8), shared.child
        child.kill()
        start = time.monotonic()
        shared.listener.wait_for_ends(names, seconds=2.0)
        assert time.monotonic() - start < 2.0
        for name in names:
            finish = shared.listener.finish(name)
            assert (finish.reason, finish.retryable) == (FinishReason.ERROR, True)
            assert finish.completion_tokens > 0
        shared.listener.wait_for_state(EngineState.READY, ready + number + 1)
        assert shared.child.pid != child.pid
        assert shared.outputs(TOKENS) == reference
    assert psutil.Process().num_fds() <= fds
    restarting = [c for s, _, c in shared.listener.states if s is EngineState.RESTARTING]
    assert all("process ended (exit status -9)" in cause for cause in restarting)


def test_a_hanging_child_is_replaced(shared: World, reference: list[list[int]]) -> None:
    names, child = shared.load(4), shared.child
    restarts, ready = shared.count(EngineState.RESTARTING), shared.count(EngineState.READY)
    child.send_signal(signal.SIGSTOP)
    late = shared.submit(PROMPTS[0], 5)
    shared.pass_time_until(EngineState.RESTARTING, restarts + 1)
    for name in (*names, late):
        finish = shared.listener.finish(name)
        assert (finish.reason, finish.retryable) == (FinishReason.ERROR, True)
        assert "hangs" in finish.error
    assert gone(child.pid)
    shared.listener.wait_for_state(EngineState.READY, ready + 1)
    assert shared.outputs(TOKENS) == reference


@pytest.mark.parametrize("hangs", [False, True])
def test_stopping_while_it_loads(model: Path, hangs: bool) -> None:
    rules = Supervision(stop_s=0.5)
    with running(config_of(model), rules) as world:
        child = start_loading(world)
        if hangs:
            child.send_signal(signal.SIGSTOP)
        world.client.stop()
        assert gone(child.pid, 0.1)
        assert world.client.state is EngineState.STOPPED


def test_stopping_a_child_that_hangs(model: Path) -> None:
    """One patience, not two: who stops the client waits no longer, and then it is gone."""
    with running(config_of(model), Supervision(stop_s=2.0)) as world:
        world.client.start()
        world.listener.wait_for_state(EngineState.READY, 1)
        child = world.child
        child.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        world.client.stop()
        assert time.monotonic() - start < 4.0
        assert gone(child.pid, 0.1)


def test_hanging_while_it_loads(model: Path) -> None:
    with running(config_of(model), Supervision(start_s=60.0, first_tries=1)) as world:
        child = start_loading(world)
        child.send_signal(signal.SIGSTOP)
        world.pass_time_until(EngineState.FAILED)
        assert "hangs" in world.listener.states[-1][2]
        assert gone(child.pid)


def start_loading(world: World) -> psutil.Process:
    world.client.start()
    while world.client.pid is None:
        time.sleep(0.01)
    return world.child


def test_stopping_what_was_never_started(model: Path) -> None:
    with running(config_of(model)) as world, pytest.raises(EngineDead, match="STARTING"):
        world.client.submit(children.request("early", [5], 3))


def test_a_wrong_model_is_final_and_named_in_one_line(tmp_path: Path) -> None:
    with running(config_of(tmp_path / "nowhere")) as world:
        world.client.start()
        world.listener.wait_for_state(EngineState.FAILED)
        ((state, info, cause),) = world.listener.states
        assert (state, info) == (EngineState.FAILED, None)
        assert str(tmp_path / "nowhere") in cause
        assert "\n" not in cause
        assert world.client.pid is None
        with pytest.raises(EngineDead, match="FAILED"):
            world.client.submit(children.request("a", [5], 3))


def test_a_child_that_never_comes_up_is_given_up(model: Path) -> None:
    """It dies before it can say why: tried as often as the rules say, and no more."""
    rules = Supervision(backoff_s=0.01, first_tries=3)
    with running(config_of(model), rules, PYTHONHOME="/nowhere") as world:
        world.client.start()
        world.listener.wait_for_state(EngineState.FAILED)
        states = [s for s, _, _ in world.listener.states]
        assert states == [EngineState.RESTARTING] * 2 + [EngineState.FAILED]
        assert world.client.state is EngineState.FAILED


def test_a_system_that_starts_no_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", popen)
    fds = psutil.Process().num_fds()
    with running(config_of(model), Supervision(backoff_s=0.01, first_tries=3)) as world:
        world.client.start()
        world.listener.wait_for_state(EngineState.FAILED)
        assert [s for s, _, _ in world.listener.states] == [
            EngineState.RESTARTING,
            EngineState.RESTARTING,
            EngineState.FAILED,
        ]
        assert all("no more processes" in cause for _, _, cause in world.listener.states)
    assert psutil.Process().num_fds() == fds


def test_a_child_does_not_outlive_its_parent(model: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
    finally:
        parent.kill()
        parent.communicate()
    assert gone(pid)


def test_stopping_ends_all_and_leaves_no_process(shared: World) -> None:
    """The last one to use the shared child."""
    names, pid = shared.load(6), shared.child.pid
    shared.client.stop()
    assert {shared.listener.finish(n).reason for n in names} == {FinishReason.DRAINED}
    assert (shared.client.state, shared.client.pid) == (EngineState.STOPPED, None)
    assert shared.listener.states[-1] == (EngineState.STOPPED, None, "")
    assert gone(pid, 0.1)
    with pytest.raises(EngineDead, match="STOPPED"):
        shared.client.submit(children.request("late", [5], 3))
    shared.client.stop()
