"""Samples of one prompt: the first computes it, the others wait for that and share its blocks.

A block that they hold together is never written: who goes on in the last one takes a copy first
(`BlockPool.own`). A sample that is preempted begins again in the same way.
"""

from __future__ import annotations

from engine.blocks import BlockPool
from engine.prefix import Hit, Prefixes
from engine.types import Sequence


class Samples:
    """Knows who shares a prompt: live sequences by `Request.group`, in order of arrival."""

    def __init__(self, pool: BlockPool, prefixes: Prefixes) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self._groups: dict[str, list[Sequence]] = {}

    def add(self, seq: Sequence) -> None:
        """`seq` is live."""
        if seq.request.group:
            self._groups.setdefault(seq.request.group, []).append(seq)

    def discard(self, seq: Sequence) -> None:
        """It is not any more."""
        if group := self._groups.get(seq.request.group):
            group.remove(seq)
            if not group:
                del self._groups[seq.request.group]

    def look_up(self, seq: Sequence) -> Hit | None:
        """What `seq`, which holds nothing, may begin with. None: it shall wait, another one is
        about to compute the prompt."""
        if not (group := self._groups.get(seq.request.group)) or seq.untold:
            return self._prefixes.look_up(seq)
        prompt = len(seq.request.prompt)
        other = next((s for s in group if s.computed >= prompt), None)
        if other is None:
            return self._prefixes.look_up(seq) if group[0] is seq else None
        found, shared = self._prefixes.look_up(seq), self._shared(seq, other)
        return found if found.tokens > shared.tokens else shared

    def _shared(self, seq: Sequence, other: Sequence) -> Hit:
        """The prompt's blocks, the last of which is to be copied where it goes on in it."""
        pool, known = self._pool, len(seq.tokens)
        # The last token is never part of a hit: its row is what the next one is drawn from.
        tokens = min(len(seq.request.prompt), known - 1)
        blocks = tuple(other.table.ids[: pool.blocks_for(tokens)])
        spared = tokens // pool.block_size
        return Hit(known, blocks, tokens, min(other.drafted, tokens), spared)
