"""A head on the target's hidden states as the draft (EAGLE, Li et al. 2024).

It drafts as a model does, with KV of its own, but reads what the target computed for the position
before (`engine.features`): a token can be fed once the target has been at the one before it. What
was drafted from its own guesses is fed again, from what the target made of it.
"""

from __future__ import annotations

from engine.draft_model import ModelDraft
from engine.types import Work


class HeadDraft(ModelDraft):
    """`DraftSource` over a head (`engine.head_network`)."""

    name = "head"

    def _readable(self, work: Work) -> int:
        return min(work.start + work.count, work.start + 1)

    def _kept(self, accepted: int) -> int:
        return 0
