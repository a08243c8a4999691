"""From tokens to output: the stop rules, token by token, and the account at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.types import Finish, FinishReason, Proposal, Sequence, SourceStats, Verdict


def append_tokens(
    seq: Sequence, tokens: Iterable[int], context_limit: int
) -> tuple[str, Finish | None]:
    """Append one by one until something ends the output; what follows is dropped."""
    pieces: list[str] = []
    stopping = seq.request.stopping
    for token in tokens:
        seq.tokens.append(token)
        if token in stopping.stop_ids:
            return "".join(pieces), Finish(FinishReason.STOP, matched=token)
        if token in stopping.eos_ids:
            return "".join(pieces), Finish(FinishReason.EOS)
        try:
            piece, stop = seq.text.push(token)
        except Exception as error:  # a bad id must hurt this request only
            return "".join(pieces), Finish(FinishReason.ERROR, error=f"detokenizing: {error}")
        pieces.append(piece)
        if stop is not None:
            return "".join(pieces), Finish(FinishReason.STOP, matched=stop)
        if seq.left <= 0:
            return "".join(pieces), Finish(FinishReason.LENGTH)
        if len(seq.tokens) >= context_limit:
            return "".join(pieces), Finish(FinishReason.CONTEXT)
    return "".join(pieces), None


def count_drafts(seq: Sequence, proposal: Proposal, verdict: Verdict, delivered: int) -> None:
    """Book a step that sampled: `delivered` tokens of it count."""
    seq.target_steps += 1
    if proposal.tokens:
        stats = SourceStats(len(proposal.tokens), min(verdict.accepted, delivered))
        before = seq.by_source.get(proposal.source, SourceStats())
        seq.by_source[proposal.source] = before + stats


def closing_text(seq: Sequence, finish: Finish) -> str:
    """Text still held back. After a stop string there is none; a text stream that fails has
    nothing more to say."""
    if finish.reason is FinishReason.STOP and isinstance(finish.matched, str):
        return ""
    try:
        return seq.text.flush()
    except Exception:  # the end must come whatever the tokenizer makes of the ids
        return ""


def account(seq: Sequence, finish: Finish, now: float) -> Finish:
    """`finish` with exact usage, times and speculation counts."""
    return replace(
        finish,
        prompt_tokens=len(seq.request.prompt),
        completion_tokens=seq.generated,
        cached_tokens=seq.cached,
        arrived=seq.request.arrived,
        scheduled=seq.scheduled,
        prefilled=seq.prefilled,
        first_token=seq.first_token,
        finished=now,
        target_steps=seq.target_steps,
        preemptions=seq.preemptions,
        by_source=tuple(seq.by_source.items()),
    )
