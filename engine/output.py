"""From tokens to output: the stop rules, token by token, and the account at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.outcome import Finish, FinishReason, SourceStats
from engine.types import Proposal, Sequence, Verdict


def append_tokens(
    seq: Sequence, tokens: Iterable[int], context_limit: int
) -> tuple[str, Finish | None]:
    """Append one by one until something ends the output; what follows is dropped."""
    pieces: list[str] = []
    request = seq.request
    stopping = request.stopping
    last = min(len(request.prompt) + stopping.max_tokens, context_limit)
    finish: Finish | None = None
    for token in tokens:
        seq.tokens.append(token)
        if request.output.text_offsets:
            seq.offsets.append(seq.text.length)
        if token in stopping.stop_ids:
            finish = _ending(seq, token, pieces, Finish(FinishReason.STOP, matched=token))
        elif token in stopping.eos_ids:
            finish = _ending(seq, token, pieces, Finish(FinishReason.EOS))
        else:
            finish = _push(seq, token, pieces)
            if finish is None and len(seq.tokens) >= last:
                finish = Finish(FinishReason.CONTEXT if seq.left > 0 else FinishReason.LENGTH)
        if finish is not None:
            break
    return "".join(pieces), finish


def _ending(seq: Sequence, token: int, pieces: list[str], finish: Finish) -> Finish:
    """The text of a token that ends the output, if it is asked for. It may complete a stop string,
    too, and is then cut like any other."""
    return (seq.request.output.include_stop and _push(seq, token, pieces)) or finish


def _push(seq: Sequence, token: int, pieces: list[str]) -> Finish | None:
    try:
        piece, stop = seq.text.push(token)
    except Exception as error:  # a bad id must hurt this request only
        return Finish(FinishReason.ERROR, error=f"detokenizing: {error}")
    pieces.append(piece)
    return None if stop is None else Finish(FinishReason.STOP, matched=stop)


def count_drafts(seq: Sequence, proposal: Proposal, verdict: Verdict, delivered: int) -> None:
    """Book a step that sampled: `delivered` tokens of it count."""
    seq.target_steps += 1
    if proposal.tokens:
        stats = SourceStats.of(len(proposal.tokens), min(verdict.accepted, delivered))
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
