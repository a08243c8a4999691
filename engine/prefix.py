"""KV that was computed before, found again by what it was computed from.

The name of a full block is a keyed BLAKE2b digest of the tokens in it and of the name before it,
so it stands for the whole text up to its end, as its KV does. The chain begins with the tenant and
the request's salt: what one tenant sends is never visible to another, not even by time. The key
is random, so names cannot be guessed or made to collide from outside.

Names are given to target KV alone; how much of a block's draft KV is valid is kept beside it
(`BlockPool.drafted`). It is a function of the tokens too, so whoever catches up with the draft
model may write it into a shared block: the same values to the same place.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from engine.blocks import BlockPool
from engine.request import Request
from engine.types import Sequence

NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class Hit:
    """What a sequence may begin with: `blocks` in which its first `tokens` tokens have target KV
    and the first `drafted` draft KV. `spared`: blocks it need not be given, others hold them.
    `looked_up`: tokens that were asked for."""

    looked_up: int = 0
    blocks: tuple[int, ...] = ()
    tokens: int = 0
    drafted: int = 0
    spared: int = 0


class Prefixes(Protocol):
    """Remembers what blocks hold."""

    def look_up(self, seq: Sequence) -> Hit:
        """What `seq`, which holds nothing, may begin with. Changes nothing in the pool."""
        ...

    def keep(self, seq: Sequence, start: int) -> None:
        """Remember the blocks of `seq` that became full and final since `computed` was `start`."""
        ...


class NoPrefixCache:
    """Remembers nothing."""

    def look_up(self, seq: Sequence) -> Hit:
        return Hit()

    def keep(self, seq: Sequence, start: int) -> None:
        return None


class PrefixCache:
    """`Prefixes` over the names of a pool's blocks. `key`: up to 64 secret bytes."""

    def __init__(self, pool: BlockPool, key: bytes) -> None:
        self._pool = pool
        self._key = key

    def look_up(self, seq: Sequence) -> Hit:
        """The last token is never part of a hit: its row is what the next one is drawn from. If all
        blocks are found, that row goes into the last of them, which the pool then copies. Whose
        prompt is to be told token by token needs all of its rows."""
        if seq.untold:
            return Hit()
        pool, size = self._pool, self._pool.block_size
        blocks: list[int] = []
        for index in range(len(seq.tokens) // size):
            block = pool.find(self._name(seq, index))
            if block is None:
                break
            blocks.append(block)
        if not blocks:
            return Hit(len(seq.tokens))
        tokens = min(len(blocks) * size, len(seq.tokens) - 1)
        drafted = min(self._drafted(blocks), tokens)
        spared = sum(pool.held(block) for block in blocks[: tokens // size])
        return Hit(len(seq.tokens), tuple(blocks), tokens, drafted, spared)

    def keep(self, seq: Sequence, start: int) -> None:
        """Only what is verified: after a stop inside accepted drafts `computed` is beyond the
        tokens that count."""
        pool, ids, size = self._pool, seq.table.ids, self._pool.block_size
        valid = min(seq.computed, len(seq.tokens))
        for index in range(start // size, valid // size):
            pool.store(ids[index], self._name(seq, index))
        # Blocks before one that has it noted were noted with it.
        drafted = min(seq.drafted, valid)
        while drafted > 0:
            index = (drafted - 1) // size
            if pool.drafted[ids[index]] >= drafted - index * size:
                break
            pool.drafted[ids[index]] = drafted - index * size
            drafted = index * size

    def _drafted(self, blocks: list[int]) -> int:
        drafted = 0
        for block in blocks:
            drafted += self._pool.drafted[block]
            if self._pool.drafted[block] < self._pool.block_size:
                break
        return drafted

    def _name(self, seq: Sequence, index: int) -> bytes:
        """The name of block `index` of what `seq` says; each is computed once in its life."""
        names, size = seq.names, self._pool.block_size
        if not names:
            names.append(self._digest(_root(seq.request)))
        while len(names) <= index + 1:
            start = (len(names) - 1) * size
            tokens = array("I", seq.tokens[start : start + size])
            names.append(self._digest(names[-1] + tokens.tobytes()))
        return names[index + 1]

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=NAME_BYTES, key=self._key).digest()


def _root(request: Request) -> bytes:
    """Who may find it. The length keeps tenant and salt apart."""
    tenant = request.tenant.encode()
    return len(tenant).to_bytes(8, "little") + tenant + request.cache_salt.encode()
