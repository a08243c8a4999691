"""Slips that are easily made in this kind of engine, made on purpose: the simulation sees each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

import engine.core
import engine.prefix
import engine.scheduler
from engine.blocks import BlockPool
from engine.draft_model import ModelDraft
from engine.outcome import Finish, FinishReason, TokenChunk
from engine.output import append_tokens
from engine.prefix import Hit, PrefixCache
from engine.scheduler import Scheduler
from engine.types import BlockTable, Proposal, Sequence, StepPlan, Verdict
from engine.verify import verify
from tests.engine.fakes import BLOCK, HashModel, Watched
from tests.engine.test_simulation import DRAFTS, perfect_draft, traffic

Patch = pytest.MonkeyPatch

admit, cancel, commit = Scheduler._admit, Scheduler.cancel, Scheduler.commit
emit, end, preempt = Scheduler._emit, Scheduler._end, Scheduler._preempt
grow, shrink = BlockPool.grow, BlockPool.shrink
look_up, propose = PrefixCache.look_up, ModelDraft.propose


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
    ) -> tuple[str, Finish | None]:
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
    def wrong(self: Scheduler, seq: Sequence, hit: Hit, now: float) -> None:
        admit(self, seq, hit, now)
        if seq.preemptions:
            seq.drafted = seq.computed

    patch.setattr(Scheduler, "_admit", wrong)


def forgets_the_target_on_preemption(patch: Patch) -> None:
    def wrong(self: Scheduler, seq: Sequence, hit: Hit, now: float) -> None:
        admit(self, seq, hit, now)
        if seq.preemptions:
            seq.computed = max(seq.computed, min(self.pool.block_size, len(seq.tokens) - 1))

    patch.setattr(Scheduler, "_admit", wrong)


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
            self._empty.append(table.ids[0])
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
    def wrong(seq: Sequence, tokens: Iterable[int], limit: int) -> tuple[str, Finish | None]:
        run, before = list(tokens), len(seq.tokens)
        result = append_tokens(seq, run, limit)
        seq.tokens.extend(run[len(seq.tokens) - before :])
        return result

    patch.setattr(engine.scheduler, "append_tokens", wrong)


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


def names_what_is_not_computed(patch: Patch) -> None:
    """As soon as the tokens of a block are known, the last of which was not fed yet."""

    def wrong(self: PrefixCache, seq: Sequence, start: int) -> None:
        ids, size = seq.table.ids, self._pool.block_size
        for index in range(min(len(seq.tokens) // size, len(ids))):
            self._pool.store(ids[index], self._name(seq, index))

    patch.setattr(PrefixCache, "keep", wrong)
    patch.setattr(Watched, "run", lambda self, feeds: self._model.run(feeds))


def finds_what_was_overwritten(patch: Patch) -> None:
    def wrong(self: BlockPool, block: int) -> None:
        self._names[block] = None
        if block in self._idle:
            del self._idle[block]
            self._empty.append(block)

    patch.setattr(BlockPool, "_unname", wrong)
    patch.setattr(BlockPool, "check", lambda self, tables: None)


def writes_a_shared_block(patch: Patch) -> None:
    patch.setattr(BlockPool, "own", lambda self, table, position: True)


def does_not_copy(patch: Patch) -> None:
    patch.setattr(HashModel, "copy_blocks", lambda self, pairs: None)


def shares_with_other_tenants(patch: Patch) -> None:
    patch.setattr(engine.prefix, "_root", lambda request: b"")


def forgets_what_came_before_a_block(patch: Patch) -> None:
    digest = PrefixCache._digest
    patch.setattr(PrefixCache, "_digest", lambda self, data: digest(self, data[-4 * BLOCK :]))


def takes_a_found_prompt_for_computed(patch: Patch) -> None:
    def wrong(self: PrefixCache, seq: Sequence) -> Hit:
        hit = look_up(self, seq)
        return replace(hit, tokens=len(hit.blocks) * self._pool.block_size)

    patch.setattr(PrefixCache, "look_up", wrong)


def takes_the_drafts_kv_for_granted(patch: Patch) -> None:
    def wrong(self: PrefixCache, seq: Sequence) -> Hit:
        hit = look_up(self, seq)
        return replace(hit, drafted=hit.tokens)

    patch.setattr(PrefixCache, "look_up", wrong)


def counts_its_own_blocks_as_found(patch: Patch) -> None:
    def wrong(self: Scheduler, seq: Sequence, hit: Hit, now: float) -> None:
        admit(self, seq, hit, now)
        seq.cached = min(hit.tokens, len(seq.request.prompt))

    patch.setattr(Scheduler, "_admit", wrong)


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
    names_what_is_not_computed,
    finds_what_was_overwritten,
    writes_a_shared_block,
    does_not_copy,
    shares_with_other_tenants,
    forgets_what_came_before_a_block,
    takes_a_found_prompt_for_computed,
    takes_the_drafts_kv_for_granted,
    counts_its_own_blocks_as_found,
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
