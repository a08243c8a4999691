"""Slips that are easily made in this kind of engine, made on purpose: the simulation sees each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

import engine.core
from engine.blocks import BlockPool
from engine.draft_model import ModelDraft
from engine.scheduler import Scheduler
from engine.types import (
    BlockTable,
    Finish,
    FinishReason,
    Proposal,
    Sequence,
    StepPlan,
    TokenChunk,
    Verdict,
)
from engine.verify import verify
from tests.engine.test_simulation import DRAFTS, perfect_draft, traffic

Patch = pytest.MonkeyPatch

append, cancel, commit = Scheduler._append, Scheduler.cancel, Scheduler.commit
emit, end, preempt = Scheduler._emit, Scheduler._end, Scheduler._preempt
grow, shrink = BlockPool.grow, BlockPool.shrink
propose = ModelDraft.propose


def accepts_one_too_many(patch: Patch) -> None:
    def wrong(proposals: Seq[Proposal], sampled: Seq[tuple[int, ...] | str]) -> list[Verdict]:
        return [
            replace(v, accepted=min(v.accepted + 1, len(p.tokens)))
            for p, v in zip(proposals, verify(proposals, sampled), strict=True)
        ]

    patch.setattr(engine.core, "verify", wrong)


def takes_the_answer_of_another_row(patch: Patch) -> None:
    def wrong(proposals: Seq[Proposal], sampled: Seq[tuple[int, ...] | str]) -> list[Verdict]:
        verdicts = verify(proposals, sampled)
        tokens = [v.next_token for v in verdicts if v.next_token is not None]
        others = iter([*tokens[1:], *tokens[:1]])
        return [
            v if v.next_token is None else replace(v, next_token=next(others)) for v in verdicts
        ]

    patch.setattr(engine.core, "verify", wrong)


def counts_a_rejected_draft(patch: Patch) -> None:
    def wrong(
        self: Scheduler, seq: Sequence, proposal: Proposal, verdict: Verdict, now: float
    ) -> TokenChunk | None:
        seq.computed += verdict.accepted < len(proposal.tokens)
        return emit(self, seq, proposal, verdict, now)

    patch.setattr(Scheduler, "_emit", wrong)


def counts_the_guess_that_was_never_fed(patch: Patch) -> None:
    def wrong(
        self: ModelDraft, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]
    ) -> None:
        for work, proposal, verdict in zip(plan.work, proposals, verdicts, strict=True):
            if proposal.source == self.name:
                work.seq.drafted = work.start + work.count + verdict.accepted

    patch.setattr(ModelDraft, "observe", wrong)


def does_not_roll_the_draft_back(patch: Patch) -> None:
    def wrong(
        self: ModelDraft, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]
    ) -> None:
        for work, proposal in zip(plan.work, proposals, strict=True):
            if proposal.source == self.name:
                work.seq.drafted = work.start + work.count + len(proposal.tokens) - 1

    patch.setattr(ModelDraft, "observe", wrong)


def skips_what_the_draft_missed(patch: Patch) -> None:
    """Feeds the newest token only, as if the draft had been fed in every step."""

    def wrong(self: ModelDraft, plan: StepPlan) -> list[Proposal]:
        for work in plan.work:
            work.seq.drafted = max(work.seq.drafted, work.start)
        return propose(self, plan)

    patch.setattr(ModelDraft, "propose", wrong)


def forgets_the_draft_on_preemption(patch: Patch) -> None:
    def wrong(self: Scheduler, seq: Sequence) -> None:
        drafted = seq.drafted
        preempt(self, seq)
        seq.drafted = drafted

    patch.setattr(Scheduler, "_preempt", wrong)


def forgets_the_target_on_preemption(patch: Patch) -> None:
    def wrong(self: Scheduler, seq: Sequence) -> None:
        computed = seq.computed
        preempt(self, seq)
        seq.computed = min(computed, self.pool.block_size)

    patch.setattr(Scheduler, "_preempt", wrong)


def resumes_with_the_prompt_only(patch: Patch) -> None:
    def wrong(self: Scheduler, seq: Sequence) -> None:
        preempt(self, seq)
        del seq.tokens[len(seq.request.prompt) :]

    patch.setattr(Scheduler, "_preempt", wrong)


def reserves_one_token_short(patch: Patch) -> None:
    patch.setattr(BlockPool, "grow", lambda self, table, tokens: grow(self, table, tokens - 1))


def gives_one_block_too_many_back(patch: Patch) -> None:
    def wrong(self: BlockPool, table: BlockTable, tokens: int) -> None:
        shrink(self, table, max(0, tokens - self.block_size))

    patch.setattr(BlockPool, "shrink", wrong)


def swaps_two_blocks(patch: Patch) -> None:
    def wrong(self: BlockPool, table: BlockTable, tokens: int) -> bool:
        before = len(table.ids)
        fits = grow(self, table, tokens)
        if before and len(table.ids) > before:
            table.ids[before - 1], table.ids[before] = table.ids[before], table.ids[before - 1]
        return fits

    patch.setattr(BlockPool, "grow", wrong)


def hands_out_a_block_that_is_in_use(patch: Patch) -> None:
    def wrong(self: BlockPool, table: BlockTable, tokens: int) -> bool:
        fits = grow(self, table, tokens)
        if fits and len(table.ids) > 3:
            self._free.append(table.ids[0])
        return fits

    patch.setattr(BlockPool, "grow", wrong)
    patch.setattr(BlockPool, "check", lambda self, tables: None)


def leaks_on_cancel(patch: Patch) -> None:
    def wrong(
        self: Scheduler, request_id: str, reason: FinishReason, now: float
    ) -> TokenChunk | None:
        seq = self._live.get(request_id)
        if seq is not None:
            seq.table.ids.clear()
        return cancel(self, request_id, reason, now)

    patch.setattr(Scheduler, "cancel", wrong)


def releases_twice(patch: Patch) -> None:
    def wrong(
        self: Scheduler, seq: Sequence, finish: Finish, now: float, *rest: object
    ) -> TokenChunk:
        again = BlockTable(seq.table.block_size, list(seq.table.ids))
        chunk = end(self, seq, finish, now, *rest)  # type: ignore[arg-type]
        self.pool.release(again)
        return chunk

    patch.setattr(Scheduler, "_end", wrong)


def commits_what_follows_the_end(patch: Patch) -> None:
    def wrong(self: Scheduler, seq: Sequence, tokens: Iterable[int]) -> tuple[str, Finish | None]:
        run, before = list(tokens), len(seq.tokens)
        result = append(self, seq, run)
        seq.tokens.extend(run[len(seq.tokens) - before :])
        return result

    patch.setattr(Scheduler, "_append", wrong)


def delivers_after_a_cancel(patch: Patch) -> None:
    def wrong(
        self: Scheduler,
        plan: StepPlan,
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        now: float,
    ) -> list[TokenChunk]:
        late = [
            TokenChunk(w.seq.request.id, w.seq.generated, (v.next_token,), "")
            for w, v in zip(plan.work, verdicts, strict=True)
            if w.seq.finish is not None and v.next_token is not None
        ]
        return commit(self, plan, proposals, verdicts, now) + late

    patch.setattr(Scheduler, "commit", wrong)


MUTANTS: tuple[Callable[[Patch], None], ...] = (
    accepts_one_too_many,
    takes_the_answer_of_another_row,
    counts_a_rejected_draft,
    counts_the_guess_that_was_never_fed,
    does_not_roll_the_draft_back,
    skips_what_the_draft_missed,
    forgets_the_draft_on_preemption,
    forgets_the_target_on_preemption,
    resumes_with_the_prompt_only,
    reserves_one_token_short,
    gives_one_block_too_many_back,
    swaps_two_blocks,
    hands_out_a_block_that_is_in_use,
    leaks_on_cancel,
    releases_twice,
    commits_what_follows_the_end,
    delivers_after_a_cancel,
)


def is_seen() -> bool:
    """Whether a bounded run of the simulation objects."""
    for seed in range(40):
        try:
            traffic(seed, DRAFTS[seed % len(DRAFTS)])
            perfect_draft(seed)
        except Exception:  # an assertion or whatever breaks first
            return True
    return False


def test_without_a_slip_nothing_is_seen() -> None:
    assert not is_seen()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_slip_is_seen(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    assert is_seen()
