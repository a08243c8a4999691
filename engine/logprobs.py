"""Logprobs: how likely a token was among all, by the row that it was drawn from.

Of the model's own distribution, or after rules and temperature (`OutputParams`); what top-k, top-p
and min-p cut off is never taken into account. Each row is looked at by itself, in double, so that
its values have the same bits in any company and behind any drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from torch import Tensor

from engine.outcome import Logprobs
from engine.types import Drawn, Feed


class Rows(NamedTuple):
    """Those of a feed that logprobs are of: behind which a token is `known`, and `drawn` ones."""

    known: Tensor
    drawn: Tensor


def rows_to_tell(feed: Feed, known: Tensor, sampled: Tensor) -> Rows:
    """To be taken before rules change `sampled` in place."""
    as_it_will_be = feed.rules is None or feed.output.processed_logprobs
    return Rows(known, sampled if as_it_will_be else sampled.clone())


def tell(feed: Feed, rows: Rows, tokens: tuple[int, ...]) -> Drawn:
    """`tokens`, each drawn in one of `rows.drawn`, and what is asked about them and about those
    that are known."""
    count = feed.output.prompt_logprobs or 0
    known = (logprobs(r, t, count) for r, t in zip(rows.known, feed.known, strict=True))
    return Drawn(tokens, _tell_drawn(feed, rows.drawn, tokens), tuple(known))


def _tell_drawn(feed: Feed, rows: Tensor, tokens: Seq[int]) -> tuple[Logprobs, ...]:
    """Up to the first that is not what was drafted: nobody will ask about those behind it."""
    count = feed.output.logprobs
    if count is None:
        return ()
    temperature = feed.sampling.temperature if feed.output.processed_logprobs else 0.0
    told = []
    for row, token, draft in zip(rows, tokens, (*feed.drafts, None), strict=False):
        told.append(logprobs(row, token, count, temperature))
        if token != draft:
            break
    return tuple(told)


def logprobs(row: Tensor, token: int, count: int, temperature: float = 0.0) -> Logprobs:
    """Of `token` and the `count` most likely ones by (vocabulary,) logits. `temperature` 0 is that
    of the model."""
    wide = row.double()
    logs = (wide / temperature if temperature > 0 else wide).log_softmax(0)
    if not count:
        return Logprobs(token, logs[token].item())
    least = logs.topk(min(count, len(logs))).values[-1]
    # topk may take any of those that are equal to the last.
    ids = (logs >= least).logical_and(logs.isfinite()).nonzero().flatten()
    ids = ids[logs[ids].argsort(descending=True, stable=True)[:count]]
    return Logprobs(token, logs[token].item(), tuple(ids.tolist()), tuple(logs[ids].tolist()))
