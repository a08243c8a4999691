"""How tokens are drawn from the rows of a pass, and what that tells whoever verifies them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from engine.model_input import Draws
from engine.types import Feed
from kernels.ops import SampleRows


class Sampler(Protocol):
    """Draws a token in each sampled row of a pass."""

    def draw(
        self, feeds: Seq[Feed], logits: Tensor, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        """One id per row of `logits` (R, V), -1 where none can be drawn; feed by feed, R being the
        sum of their `sample`. With it what each row was drawn from, (R, V), if that is needed."""
        ...


class Coupled:
    """Target and drafts share their noise, so that a draft is right as often as it would be drawn
    again (see `engine.verify`)."""

    def __init__(self, sample_rows: SampleRows) -> None:
        self._sample_rows = sample_rows

    def draw(
        self, feeds: Seq[Feed], logits: Tensor, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        """See `Sampler`."""
        d = draws
        ids = self._sample_rows(
            logits, d.temperature, d.top_k, d.top_p, d.min_p, d.seeds, d.positions
        )
        tokens: list[int] = ids.tolist()
        return tokens, None
