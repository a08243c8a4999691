"""Coupled verification: drafts decide how many tokens a step yields, never which ones.

The token at absolute position i is a deterministic function of the target's processed logits, the
seed and i (Gumbel-max with noise keyed by seed, position and token id; `kernels.reference`). A
draft is accepted iff it equals that token; the first that differs is replaced by it. So every
emitted token is the target's own sample, whatever drafted, and however many (Daliri, Musco,
Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.types import Drawn, Proposal, Verdict

UNUSABLE, RULED_OUT = -1, -2
ERRORS = {
    UNUSABLE: "no token can be drawn: the logits are not numbers",
    RULED_OUT: "no token can be drawn: what is asked for rules out every one",
}


def verify(proposals: Seq[Proposal], drawn: Seq[Drawn | str]) -> list[Verdict]:
    """Compare each proposal with the target's own tokens.

    `drawn[i]` holds len(proposal) + 1 tokens, none if work i does not sample, or is the text of
    the error that befell it. Row j is only meaningful while drafts before j were right, so a row
    that none can be drawn from fails the sequence only once it is the first of a step.
    """
    return [_verdict(p.tokens, d) for p, d in zip(proposals, drawn, strict=True)]


def _verdict(drafts: tuple[int, ...], drawn: Drawn | str) -> Verdict:
    if isinstance(drawn, str):
        return Verdict(error=drawn)
    own = drawn.tokens
    if not own:
        return Verdict(known=drawn.known)
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == own[accepted]:
        accepted += 1
    if own[accepted] < 0:
        if not accepted:
            return Verdict(error=ERRORS[own[accepted]])
        accepted -= 1  # What was right before the bad row is delivered, as without drafts.
    logprobs = drawn.logprobs[: accepted + 1]
    return Verdict(accepted, own[accepted], logprobs=logprobs, known=drawn.known)
