"""What can never be served is refused at once, by name; what can is not."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest
from engine.outcome import FinishReason
from engine.request import Request, StopParams
from tests.engine.fakes import Rig, reference

NEVER = frozenset[int]()


@pytest.mark.parametrize("length", [144, 145, 159, 160, 161, 200])
def test_a_prompt_that_can_never_fit_does_not_wait_for_ever(length: int) -> None:
    """Ten blocks of sixteen. Whatever becomes of it, the next request is served."""
    rig = Rig(num_blocks=10, block_size=16, max_step_rows=64)
    prompt = [1 + i % 6 for i in range(length)]
    rig.submit("long", prompt, 1, ignore_eos=True)
    rig.submit("short", prompt[:10], 5, ignore_eos=True)
    rig.drain(limit=50)
    long = rig.finish("long")
    if length + 1 <= 160:
        assert (long.reason, rig.tokens("long")) == (
            FinishReason.LENGTH,
            reference(prompt, 1, stop_ids=NEVER),
        )
    else:
        assert (long.reason, rig.target.rows < 64) == (FinishReason.ERROR, True)
        assert "160 tokens" in long.error
        assert f"{length + 1} tokens" in long.error
        assert not long.retryable
    assert rig.tokens("short") == reference(prompt[:10], 5, stop_ids=NEVER)
    assert rig.finish("short").reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt", [1, 80, 158, 159])
@pytest.mark.parametrize("draft", ["none", "junk", "perfect"])
def test_all_that_is_admitted_can_be_finished(prompt: int, draft: str) -> None:
    """Up to the very last token of the pool, drafts or not."""
    rig = Rig(num_blocks=10, block_size=16, max_step_rows=64, draft=draft, max_draft_tokens=8)
    rig.submit("all", [1 + i % 6 for i in range(prompt)], 160 - prompt, ignore_eos=True)
    rig.drain()
    finish = rig.finish("all")
    assert (finish.reason, finish.completion_tokens) == (FinishReason.LENGTH, 160 - prompt)
    assert finish.preemptions == 0


def test_the_context_limit_counts_when_it_is_the_smaller_one() -> None:
    """A generous `max_tokens` is no reason to refuse: the context ends it before the pool does."""
    rig = Rig(num_blocks=10, block_size=16, context_limit=100)
    rig.submit("a", [1] * 20, 10_000, ignore_eos=True)
    rig.drain()
    assert (rig.finish("a").reason, len(rig.tokens("a"))) == (FinishReason.CONTEXT, 80)


def test_an_id_that_is_live_is_refused_and_the_first_one_untouched() -> None:
    rig = Rig()
    rig.submit("same", [1, 2, 3], 20)
    rig.step()
    again = Request("same", (4, 5), StopParams(3))
    with pytest.raises(InvalidRequest, match="already live"):
        rig.scheduler.submit(again)
    rig.scheduler.check()
    rig.drain()
    assert rig.tokens("same") == reference([1, 2, 3], 20)
    rig.chunks.clear()
    rig.submit("same", [4, 5], 3)
    rig.drain()
    assert rig.tokens("same") == reference([4, 5], 3)


def test_a_refused_request_leaves_nothing_behind() -> None:
    rig = Rig(num_blocks=2)
    for i in range(100):
        rig.submit(f"no{i}", [1] * 30, 1, deadline=1e9)
    chunks = rig.step()
    assert [c.request_id for c in chunks] == [f"no{i}" for i in range(100)]
    assert not rig.engine.busy
    assert (rig.scheduler.live, rig.scheduler.waiting) == ([], 0)
    assert rig.target.runs == 0
