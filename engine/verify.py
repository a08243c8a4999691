"""Coupled verification: drafts decide how many tokens a step yields, never which ones.

The token at absolute position i is a deterministic function of the target's processed logits, the
seed and i (Gumbel-max with noise keyed by seed, position and token id; `kernels.reference`). A
draft is accepted iff it equals that token; the first that differs is replaced by it. So every
emitted token is the target's own sample, whatever drafted, and however many (Daliri, Musco,
Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.types import Proposal, Verdict

UNUSABLE = -1


def verify(proposals: Seq[Proposal], sampled: Seq[tuple[int, ...] | str]) -> list[Verdict]:
    """Compare each proposal with the target's own tokens.

    `sampled[i]` holds len(proposal) + 1 tokens, none if work i does not sample, or the text of
    the error that befell it. Row j is only meaningful while drafts before j were right, so a row
    without usable logits (-1) fails the sequence only once it is the first of a step.
    """
    return [_verdict(p.tokens, s) for p, s in zip(proposals, sampled, strict=True)]


def _verdict(drafts: tuple[int, ...], sampled: tuple[int, ...] | str) -> Verdict:
    if isinstance(sampled, str):
        return Verdict(error=sampled)
    if not sampled:
        return Verdict()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    if sampled[accepted] != UNUSABLE:
        return Verdict(accepted, sampled[accepted])
    if accepted:
        # What was right before the bad row is delivered, as it would be without drafts.
        return Verdict(accepted - 1, drafts[accepted - 1])
    return Verdict(error="no token can be drawn: logits are not numbers, or all are ruled out")
