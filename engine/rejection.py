"""Rejection sampling of drafts (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023), to compare
coupled verification with.

A draft x, drawn from q where the target has p, is accepted with probability min(1, p(x) / q(x));
the first that is not is replaced by a draw from max(p - q, 0), normalised. So the output has the
target's law, but which output it is depends on the drafts. Both are what rules, temperature and
truncation have left, and q is what x was drawn from; a draft that was certain has all of q.

A row's answer needs nothing of the other rows: the draft itself where it is accepted, otherwise a
token that it is not. The rest is `engine.verify`, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.model_input import Draws
from engine.types import Feed
from kernels.reference import survivors, uniform

REJECTION_VERSION = 1
# Streams of randomness by position, where the noise of coupling has ids of tokens: none of them may
# know of another (`vllm#54282`: shared ones are a bias).
PROPOSAL, ACCEPTANCE, REPLACEMENT = -2, -3, -4
NO_DRAFT = -1


class Independent:
    """`Sampler` of a draft model: what it draws tells nothing about what the target will."""

    def draw(
        self, feeds: Seq[Feed], logits: Tensor, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        """See `engine.sampler.Sampler`."""
        q = law(logits, draws)
        return draw_from(q, _uniform(draws, PROPOSAL)).tolist(), q


class Rejection:
    """`Sampler` of the target: accepts drafts or replaces them."""

    def draw(
        self, feeds: Seq[Feed], logits: Tensor, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        """See `engine.sampler.Sampler`."""
        p = law(logits, draws)
        drafts, q = _proposed(feeds, p)
        accept, replace = _uniform(draws, ACCEPTANCE), _uniform(draws, REPLACEMENT)
        return accept_or_replace(p, q, drafts, accept, replace).tolist(), None


def law(logits: Tensor, draws: Draws) -> Tensor:
    """What a coupled draw would draw from: (R, V) probabilities, double; NaN if from nothing."""
    return survivors(logits, draws.temperature, draws.top_k, draws.top_p, draws.min_p).softmax(1)


def accept_or_replace(
    p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, replace: Tensor
) -> Tensor:
    """Each row's token. `p` and `q` (R, V) double; `drafts` (R,) ids, NO_DRAFT with a `q` of zeros;
    `accept` and `replace` (R,) uniform in (0, 1)."""
    at = drafts.clamp(min=0)[:, None]
    accepted = (drafts != NO_DRAFT) & (accept * q.gather(1, at)[:, 0] < p.gather(1, at)[:, 0])
    left = (p - q).clamp(min=0.0)
    # Where p is q but for rounding nothing may be left.
    left = torch.where(left.sum(1, keepdim=True) > 0, left, p)
    return torch.where(accepted, drafts, draw_from(left, replace))


def draw_from(weights: Tensor, u: Tensor) -> Tensor:
    """An id per row of `weights` (R, V), in proportion to them, by inversion; -1 where NaN."""
    upto = weights.cumsum(1)
    total = upto[:, -1]
    # Rounding must not carry the mark to the total: beyond it there is no token.
    mark = torch.minimum(u * total, total.nextafter(torch.zeros_like(total)))
    ids = torch.searchsorted(upto, mark[:, None], right=True)[:, 0]
    return torch.where(total.isnan(), -1, ids)


def _uniform(draws: Draws, stream: int) -> Tensor:
    return uniform(draws.seeds, draws.positions, torch.tensor(stream).to(draws.seeds.device))


def _proposed(feeds: Seq[Feed], p: Tensor) -> tuple[Tensor, Tensor]:
    """The draft that each row of `p` is asked about, and what it was drawn from."""
    drafts = torch.full((len(p),), NO_DRAFT)
    q = torch.zeros_like(p)
    end = 0
    for feed in feeds:
        first, end = end, end + feed.sample
        if not feed.drafts:
            continue
        rows = slice(first, end - 1)
        drafts[rows] = torch.tensor(feed.drafts)
        if feed.draft_probs is None:
            q[rows].scatter_(1, drafts[rows, None].to(q.device), 1.0)
        else:  # of a vocabulary that may lack the padding of the target's
            probs = torch.stack(tuple(feed.draft_probs))
            q[rows, : probs.shape[1]] = probs
    return drafts.to(p.device), q
