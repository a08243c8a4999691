"""The book of live requests: exactly one end for each, whatever becomes of the engine."""

from __future__ import annotations

import pytest

from engine.client import Ledger
from engine.errors import InvalidRequest
from engine.outcome import Finish, FinishReason, TokenChunk
from engine.request import Request, StopParams

END = Finish(FinishReason.LENGTH)
LOST = Finish(FinishReason.ERROR, error="lost", retryable=True)


def request(name: str) -> Request:
    return Request(name, (1, 2, 3), StopParams(5), arrived=7.0)


def chunk(name: str, offset: int, tokens: int, finish: Finish | None = None) -> TokenChunk:
    return TokenChunk(name, offset, (1,) * tokens, "x" * tokens, finish)


def test_what_is_live_is_passed_on_until_its_end() -> None:
    ledger = Ledger()
    ledger.open(request("a"))
    ledger.open(request("b"))
    assert len(ledger) == 2
    step = [chunk("a", 0, 2), chunk("nobody", 0, 1), chunk("b", 0, 1, END)]
    assert ledger.pass_on(step, 1.0) == [step[0], step[2]]
    assert len(ledger) == 1
    assert ledger.pass_on([chunk("b", 1, 1)], 1.0) == []
    assert ledger.pass_on([chunk("a", 2, 0, END)], 1.0) == [chunk("a", 2, 0, END)]
    assert len(ledger) == 0


def test_who_is_left_gets_an_end_with_exact_usage() -> None:
    ledger = Ledger()
    for name in ("a", "b", "c"):
        ledger.open(request(name))
    ledger.pass_on([chunk("a", 0, 2), chunk("c", 0, 1, END), chunk("a", 2, 3)], 1.0)
    ends = ledger.close_all(LOST, 9.0)
    assert [(c.request_id, c.offset, c.tokens, c.text) for c in ends] == [
        ("a", 5, (), ""),
        ("b", 0, (), ""),
    ]
    for end, tokens in zip(ends, (5, 0), strict=True):
        assert end.finish is not None
        assert (end.finish.reason, end.finish.error) == (FinishReason.ERROR, "lost")
        assert end.finish.retryable
        assert (end.finish.prompt_tokens, end.finish.completion_tokens) == (3, tokens)
        assert (end.finish.arrived, end.finish.finished) == (7.0, 9.0)
        assert end.finish.first_token == (1.0 if tokens else None)
    assert ledger.close_all(LOST, 9.0) == []
    assert ledger.pass_on([chunk("a", 5, 1)], 1.0) == []


def test_an_id_that_is_live_is_refused_and_the_first_one_kept() -> None:
    ledger = Ledger()
    ledger.open(request("a"))
    ledger.pass_on([chunk("a", 0, 2)], 1.0)
    with pytest.raises(InvalidRequest, match="'a' is already live"):
        ledger.open(request("a"))
    (end,) = ledger.close_all(LOST, 0.0)
    assert end.offset == 2
    ledger.open(request("a"))
    assert len(ledger) == 1
