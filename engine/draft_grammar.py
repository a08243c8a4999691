"""Drafts and grammars: what a grammar forces is a free draft, what it forbids is not verified."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.draft import DraftWrapper
from engine.types import NO_PROPOSAL, OutputGrammar, Proposal, StepPlan, Verdict, Work


class ForcedDraft:
    """`DraftSource` of the tokens that the grammar of a request, or the text that it must begin
    with, leaves no choice about. They are always right, unless another rule forbids them; it comes
    before the sources that guess."""

    name = "grammar"
    errors = 0

    def propose(self, plan: StepPlan) -> list[Proposal]:
        return [self._one(work) for work in plan.work]

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        return None

    def forget(self, request_id: str) -> None:
        return None

    def _one(self, work: Work) -> Proposal:
        rules = work.seq.rules
        if rules is None or not work.draft_cap:
            return NO_PROPOSAL
        forced = rules.forced(work.draft_cap)
        return Proposal(forced, self.name) if forced else NO_PROPOSAL


class LegalDraft(DraftWrapper):
    """Wraps a source: its guesses end before the first token that cannot come there, so that no row
    is spent on it. One that was drawn is spent a row on: left out for what it is, it would not be
    replaced as rejection sampling must (`engine.rejection`)."""

    def propose(self, plan: StepPlan) -> list[Proposal]:
        proposals = super().propose(plan)
        return [_cut(w, p) for w, p in zip(plan.work, proposals, strict=True)]


def _cut(work: Work, proposal: Proposal) -> Proposal:
    grammar = _grammar(work)
    if grammar is None or not proposal.tokens:
        return proposal
    count = grammar.legal(proposal.tokens)
    if proposal.probs is not None:
        count += 1
        return replace(proposal, tokens=proposal.tokens[:count], probs=proposal.probs[:count])
    return replace(proposal, tokens=proposal.tokens[:count]) if count else NO_PROPOSAL


def _grammar(work: Work) -> OutputGrammar | None:
    rules = work.seq.rules
    return None if rules is None else rules.grammar
