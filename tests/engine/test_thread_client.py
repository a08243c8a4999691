"""The engine in a thread: every request gets exactly one end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import pytest

from engine.client import EngineState
from engine.core import Engine
from engine.errors import EngineDead, InvalidRequest
from engine.host import LastReport
from engine.outcome import FinishReason
from engine.request import Request, SamplingParams, StopParams
from engine.thread import ThreadClient
from engine.types import Drawn, Feed, Model, ModelInfo
from tests.engine.fakes import BLOCK, EOS, VOCAB, Rig, reference
from tests.engine.listener import RecordingListener

NEVER = frozenset[int]()
INFO = ModelInfo(
    model="hash",
    architecture="Hash",
    directory="",
    context_limit=10_000,
    vocab_size=VOCAB,
    eos_ids=(EOS,),
    dtype="float32",
    device="cpu",
    draft_sources=(),
    max_draft_tokens=4,
    block_size=BLOCK,
    num_blocks=64,
    fingerprint="0" * 32,
)


def request(name: str, prompt: Seq[int] = (1, 2), tokens: int = 20) -> Request:
    return Request(name, tuple(prompt), StopParams(tokens), SamplingParams(temperature=0.0))


class Gate:
    """A model that can be held up, and made to raise."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.error: BaseException | None = None

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        self.entered.set()
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        return self._model.run(feeds)


class Running:
    """A client, its listener and the gate in front of its model."""

    def __init__(self) -> None:
        self.listener = RecordingListener()
        self.gate: Gate
        self.client = ThreadClient(self._make, self.listener)

    def _make(self, reports: LastReport) -> tuple[Engine, ModelInfo]:
        def gated(model: Model) -> Model:
            self.gate = Gate(model)
            return self.gate

        rig = Rig(draft="ngram,model", wrap=gated)
        rig.engine._observer = reports
        return rig.engine, INFO


@contextmanager
def running() -> Iterator[Running]:
    world = Running()
    world.client.start()
    world.listener.wait_for_state(EngineState.READY)
    try:
        yield world
    finally:
        world.gate.open.set()
        world.client.stop()


def test_ready_then_tokens_then_one_end() -> None:
    with running() as world:
        assert world.client.state is EngineState.READY
        assert world.listener.states == [(EngineState.READY, INFO, "")]
        for i in range(30):
            world.client.submit(request(str(i), [1 + i % 6, 2]))
        world.listener.wait_for_ends(map(str, range(30)))
        for i in range(30):
            assert world.listener.finish(str(i)).reason is FinishReason.LENGTH
            assert world.listener.tokens(str(i)) == reference([1 + i % 6, 2], 20, stop_ids=NEVER)
        assert sum(r.emitted for r in world.listener.reports) == 600


def test_submitting_from_several_threads() -> None:
    with running() as world:

        def submit(name: str) -> None:
            for i in range(25):
                world.client.submit(request(f"{name}{i}", tokens=3))

        threads = [threading.Thread(target=submit, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ids = [f"{name}{i}" for name in "abcd" for i in range(25)]
        world.listener.wait_for_ends(ids)
        assert all(world.listener.finish(i).reason is FinishReason.LENGTH for i in ids)


def test_cancelling_what_runs_and_what_does_not() -> None:
    with running() as world:
        world.gate.open.clear()
        world.gate.entered.clear()
        world.client.submit(request("a", tokens=100))
        assert world.gate.entered.wait(10)
        world.client.cancel("nobody")
        world.client.cancel("a", FinishReason.REPLACED)
        world.gate.open.set()
        world.listener.wait_for_ends(["a"])
        assert world.listener.finish("a").reason is FinishReason.REPLACED
        assert world.listener.tokens("a") == []
        world.client.cancel("a")
        world.client.submit(request("a"))
        world.listener.wait(lambda: len(world.listener.tokens("a")) == 20)


def test_a_live_id_is_refused() -> None:
    with running() as world:
        world.gate.open.clear()
        world.client.submit(request("a"))
        with pytest.raises(InvalidRequest, match="already live"):
            world.client.submit(request("a", [5]))
        world.gate.open.set()
        world.listener.wait_for_ends(["a"])
        assert world.listener.tokens("a") == reference([1, 2], 20, stop_ids=NEVER)


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError("no"), SystemExit("no")])
def test_an_engine_that_dies_ends_all(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as world:
        world.gate.open.clear()
        for i in range(5):
            world.client.submit(request(str(i)))
        monkeypatch.setattr(Engine, "_forward", _raising(error))
        world.gate.error = error
        world.gate.open.set()
        world.listener.wait_for_state(EngineState.FAILED)
        world.listener.wait_for_ends(map(str, range(5)))
        for i in range(5):
            finish = world.listener.finish(str(i))
            assert finish.reason is FinishReason.ERROR
            assert "no" in finish.error
        assert world.client.state is EngineState.FAILED
        assert "no" in world.listener.states[-1][2]
        with pytest.raises(EngineDead, match="FAILED"):
            world.client.submit(request("late"))


def test_an_engine_that_cannot_be_made() -> None:
    def factory(reports: LastReport) -> tuple[Engine, ModelInfo]:
        raise ValueError("no such model")

    listener = RecordingListener()
    client = ThreadClient(factory, listener)
    with pytest.raises(EngineDead, match="STARTING"):
        client.submit(request("early"))
    client.start()
    listener.wait_for_state(EngineState.FAILED)
    assert listener.states == [(EngineState.FAILED, None, "ValueError: no such model")]
    client.stop()


def test_stopping_ends_all_as_drained() -> None:
    with running() as world:
        world.gate.open.clear()
        world.gate.entered.clear()
        for i in range(12):
            world.client.submit(request(str(i), tokens=50))
        assert world.gate.entered.wait(10)
        stopper = threading.Thread(target=world.client.stop)
        stopper.start()
        world.gate.open.set()
        stopper.join(30)
        assert not stopper.is_alive()
        assert {world.listener.finish(str(i)).reason for i in range(12)} == {FinishReason.DRAINED}
        assert world.client.state is EngineState.STOPPED
        with pytest.raises(EngineDead, match="STOPPED"):
            world.client.submit(request("late"))
        world.client.stop()


def test_stopping_what_was_never_started() -> None:
    ThreadClient(lambda _: (_ for _ in ()).throw(AssertionError), RecordingListener()).stop()


def test_a_request_is_refused_or_ended_even_if_the_engine_dies_meanwhile() -> None:
    """The engine ends just as `submit` has found it READY."""
    with running() as world:
        client, opened = world.client, world.client._ledger.open

        def late(request: Request) -> None:
            threading.Thread(target=client.stop).start()
            # Its end must not be declared before this request is in the book.
            threading.Event().wait(0.3)
            opened(request)

        client._ledger.open = late  # type: ignore[method-assign]
        client.submit(request("a"))
        world.listener.wait_for_ends(["a"], seconds=10)
        assert world.listener.finish("a").reason is FinishReason.DRAINED


def _raising(error: BaseException) -> Callable[..., None]:
    def forward(*_: object) -> None:
        raise error

    return forward
