"""Mailbox and router: nothing lost, nothing twice, whatever the reader's pace; and admission."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client import EngineState
from engine.observer import StepReport
from engine.outcome import Finish, FinishReason, TokenChunk
from engine.request import Request, StopParams
from engine.types import ModelInfo
from service.admission import MOST_RETRY_S, Admission, ServedModel
from service.router import MOST_LOGPROBS, Mailbox, Outbox, Router
from service.status import Reason, Refused
from tests.service.fakes import TIMEOUT_S, logprobs_of
from tests.service.harness import details

END = Finish(FinishReason.EOS)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.text(max_size=3), st.booleans()), min_size=1),
)
def test_what_is_taken_is_what_was_put(puts: list[tuple[int, str, bool]]) -> None:
    """Chunks put and taken at any pace join to the same output, with gapless offsets."""
    box = Mailbox("name", Outbox())
    offset, taken = 0, []
    for n, (count, text, take) in enumerate(puts):
        finish = END if n == len(puts) - 1 else None
        tokens = tuple(range(offset, offset + count))
        box.put(TokenChunk("r", offset, tokens, text, finish, text_offsets=tokens))
        offset += count
        if take:
            taken.append(box.take())
    taken.append(box.take())
    chunks = [chunk for chunk in taken if chunk is not None]
    assert [t for c in chunks for t in c.tokens] == list(range(offset))
    assert "".join(c.text for c in chunks) == "".join(text for _, text, _ in puts)
    position = 0
    for chunk in chunks:
        assert (chunk.offset, chunk.request_id) == (position, "name")
        assert chunk.text_offsets == chunk.tokens
        position += len(chunk.tokens)
    assert [c.finish for c in chunks] == [None] * (len(chunks) - 1) + [END]
    assert box.take() is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, MOST_LOGPROBS + 9), st.integers(0, 2)), min_size=1))
def test_with_logprobs_there_is_more_than_one_chunk(puts: list[tuple[int, int]]) -> None:
    """However many pile up: as many as tokens in each, in order, and none is left lying."""
    outbox = Outbox()
    box, taken, said = Mailbox("name", outbox), [], 0
    for n, (count, takes) in enumerate(puts):
        finish = END if n == len(puts) - 1 else None
        ids = tuple(range(said, said + count))
        box.put(TokenChunk("r", said, ids, f"{n} ", finish, logprobs_of(ids, 0)))
        said += count
        for _ in range(takes):
            marked = outbox.next()
            taken.append(marked and marked.take())
    while (marked := outbox.next()) is not None:
        taken.append(marked.take())
    chunks = [chunk for chunk in taken if chunk is not None]
    position = 0
    for chunk in chunks:
        assert chunk.offset == position
        assert chunk.logprobs == logprobs_of(chunk.tokens, 0)
        assert len(chunk.tokens) < 2 * MOST_LOGPROBS + 9
        position += len(chunk.tokens)
    assert position == said
    assert "".join(c.text for c in chunks) == "".join(f"{n} " for n in range(len(puts)))
    assert [c.finish for c in chunks] == [None] * (len(chunks) - 1) + [END]


async def test_mailboxes_come_in_the_order_in_which_they_got_something() -> None:
    outbox = Outbox()
    boxes = [Mailbox(str(n), outbox) for n in range(3)]
    for n in (2, 0, 1, 0):
        boxes[n].put(TokenChunk("r", 0, (), "x"))
    assert [(await outbox.chunk())[1].request_id for _ in range(3)] == ["2", "0", "1"]
    assert outbox.next() is None


async def test_a_wake_between_look_and_wait_is_not_lost() -> None:
    outbox = Outbox()
    box = Mailbox("a", outbox)
    assert outbox.next() is None
    box.put(TokenChunk("r", 0, (1,), "x"))
    async with asyncio.timeout(TIMEOUT_S):
        await outbox.wait()
        assert (await outbox.chunk())[1].tokens == (1,)


class Spy:
    """A receiver, a state watcher and a step watcher."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self.states: list[EngineState] = []
        self.threads: set[int] = set()

    def deliver(self, chunk: TokenChunk) -> None:
        self.threads.add(threading.get_ident())
        self.chunks.append(chunk)

    def engine_changed(self, state: EngineState, info: ModelInfo | None, cause: str) -> None:
        self.threads.add(threading.get_ident())
        self.states.append(state)


def ignore(report: StepReport) -> None:
    return None


async def test_a_step_is_one_hand_over_and_arrives_on_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spies = {str(n): Spy() for n in range(50)}
    states = Spy()
    router = Router(states, ignore)
    loop = asyncio.get_running_loop()
    hand_overs = 0
    original = loop.call_soon_threadsafe

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal hand_overs
        hand_overs += 1
        return original(*args, **kwargs)

    for name, spy in spies.items():
        router.add(name, spy)
    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    chunks = [TokenChunk(name, 0, (1,), "x", END) for name in spies]
    thread = threading.Thread(target=router.deliver, args=(chunks,))
    thread.start()
    thread.join()
    assert hand_overs == 1
    monkeypatch.undo()
    async with asyncio.timeout(TIMEOUT_S):
        await router.idle.wait()
    assert all(len(spy.chunks) == 1 for spy in spies.values())
    assert {t for spy in spies.values() for t in spy.threads} == {threading.get_ident()}
    assert router.live == ()
    router.changed(EngineState.READY, None, "")
    await asyncio.sleep(0)
    router.close()
    router.changed(EngineState.STOPPED, None, "")
    router.deliver(chunks)
    await asyncio.sleep(0)
    assert states.states == [EngineState.READY]


def request(priority: int = 1, tokens: int = 1) -> Request:
    return Request("r", (1,) * tokens, StopParams(1), priority=priority)


def opened(now: list[float], max_waiting: int = 100, max_tokens: int = 10_000) -> Admission:
    admission = Admission(max_waiting, max_tokens, lambda: now[0])
    admission.model = ServedModel(None, None)  # type: ignore[arg-type]
    return admission


def test_a_place_is_given_back_once() -> None:
    admission = opened([0.0], max_waiting=1)
    (ticket,) = admission.enter(request())
    ticket.leave()
    ticket.leave()
    assert admission.waiting == 0
    admission.enter(request())
    with pytest.raises(Refused) as caught:
        admission.enter(request())
    assert caught.value.reason is Reason.QUEUE_FULL


def test_nothing_is_admitted_while_draining() -> None:
    admission = opened([0.0])
    admission.draining = True
    with pytest.raises(Refused) as caught:
        admission.enter(request())
    assert caught.value.reason is Reason.DRAINING
    assert admission.ready_model() is admission.model  # its description still is


def test_the_prediction_follows_the_rate_at_which_the_queue_moves() -> None:
    """With one departure a second and 40 waiting, half of them are gone after 20 s."""
    now = [0.0]
    admission = opened(now, max_waiting=40)
    tickets = [admission.enter(request())[0] for _ in range(40)]
    assert admission.retry_after_s() < 5  # nothing is known yet
    for _ in range(60):
        now[0] += 1.0
        tickets.pop(0).leave()
        tickets += admission.enter(request())
    assert admission.retry_after_s() == pytest.approx(20, rel=0.05)
    with pytest.raises(Refused) as caught:
        admission.enter(request())
    found = details(caught.value.status)
    assert float(found["RetryInfo"]["retryDelay"].removesuffix("s")) == pytest.approx(20, rel=0.05)
    for _ in range(60):
        now[0] += 100.0
        tickets.pop(0).leave()
        tickets += admission.enter(request())
    assert admission.retry_after_s() == MOST_RETRY_S


def test_an_idle_time_is_no_sign_of_a_slow_queue() -> None:
    now = [0.0]
    admission = opened(now)
    for _ in range(50):
        now[0] += 3600.0
        (ticket,) = admission.enter(request())
        now[0] += 0.01
        ticket.leave()
    admission.enter(request())
    assert admission.retry_after_s() == pytest.approx(0.1)
