"""Requests whose grammar is yet to be compiled are held beside the steps of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from engine.grammar import Grammars
from engine.host import Host, Inbox, LastReport
from engine.messages import Cancel, Stepped, Stop, Submit
from engine.outcome import FinishReason, TokenChunk
from engine.request import Request
from tests.engine.test_grammar import EOS, VOCAB, grammars, plainly, requests, rig
from tests.engine.test_runner import TinyRig
from tests.engine.vocabularies import byte_level


class Slow:
    """Compiles what it is asked for once it is let."""

    def __init__(self) -> None:
        self.go: dict[str, Callable[[], None]] = {}
        self.ready: set[str] = set()

    def prepare(self, request: Request, then: Callable[[], None]) -> bool:
        if request.grammar is None or request.id in self.ready:
            return True
        self.go[request.id] = then
        return False

    def finish(self, name: str) -> None:
        self.ready.add(name)
        self.go.pop(name)()


def serve(
    served: TinyRig, inbox: Inbox, on_chunks: Callable[[int, list[TokenChunk]], None]
) -> None:
    steps = 0

    def send(stepped: Stepped) -> None:
        nonlocal steps
        steps += 1
        assert steps < 5000
        on_chunks(steps, list(stepped.chunks))

    Host(served.engine, LastReport(), inbox, send).run()


def test_the_others_go_on_and_what_was_cancelled_meanwhile_ends() -> None:
    served, inbox, slow = rig("grammar,ngram"), Inbox(), Slow()
    served.engine.prepare = slow.prepare
    free = replace(requests()[0], id="free", grammar=None)
    held, gone = (replace(requests()[i], id=name) for i, name in ((1, "held"), (2, "gone")))
    for request in (held, gone, free):
        inbox.put(Submit(request))
    inbox.put(Cancel("gone"))
    inbox.put(Cancel("unknown"))
    got: dict[str, list[int]] = {"held": [], "gone": [], "free": []}
    reasons: dict[str, FinishReason] = {}

    def on_chunks(steps: int, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            got[chunk.request_id].extend(chunk.tokens)
            if chunk.finish is not None:
                reasons[chunk.request_id] = chunk.finish.reason
        if "free" in reasons and slow.go:
            assert not got["held"]
            for name in list(slow.go):
                slow.finish(name)
        if len(reasons) == 3:
            inbox.put(Stop())

    serve(served, inbox, on_chunks)
    assert tuple(got["held"]) == plainly()[1]
    assert (got["gone"], reasons["gone"]) == ([], FinishReason.CANCELLED)
    assert got["free"]


def test_a_stop_does_not_wait_for_a_grammar() -> None:
    served, inbox, slow = rig("none"), Inbox(), Slow()
    served.engine.prepare = slow.prepare
    inbox.put(Submit(requests()[0]))
    inbox.put(Stop())
    serve(served, inbox, lambda steps, chunks: None)
    assert list(slow.go) == ["0"]


def test_grammars_are_compiled_in_another_thread_and_found_again() -> None:
    fresh = Grammars(byte_level(), VOCAB, (EOS,))
    asked, told = requests()[0], threading.Event()
    threads: list[str] = []

    def then() -> None:
        threads.append(threading.current_thread().name)
        told.set()

    assert fresh.prepare(replace(asked, grammar=None), then)
    assert not fresh.prepare(asked, then)
    assert told.wait(30)
    assert threads == ["grammar"]
    assert fresh.prepare(asked, then)
    assert asked.grammar is not None
    assert fresh.matcher(asked.grammar) is not grammars().matcher(asked.grammar)


def test_one_that_does_not_compile_is_told_all_the_same() -> None:
    fresh, inbox = Grammars(byte_level(), VOCAB, (EOS,)), Inbox()
    served = TinyRig("llama", "none", vocab=VOCAB, grammars=fresh)
    served.engine.prepare = fresh.prepare
    asked = requests()[0]
    assert asked.grammar is not None
    for name, text in (("syntax", "{"), ("type", '{"type": "nope"}')):
        inbox.put(Submit(replace(asked, id=name, grammar=replace(asked.grammar, text=text))))
    errors: dict[str, str] = {}

    def on_chunks(steps: int, chunks: list[TokenChunk]) -> None:
        errors.update({c.request_id: c.finish.error for c in chunks if c.finish is not None})
        if len(errors) == 2:
            inbox.put(Stop())

    serve(served, inbox, on_chunks)
    assert "no JSON" in errors["syntax"]
    assert "Invalid type" in errors["type"]
