"""Physical KV blocks: who owns which. Whoever reserves also releases, and exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.types import BlockTable


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens with reference counts.

    Law: every block is free (no reference) or held by as many tables as it has references.
    A block with more than one reference must not be written.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` positions need."""
        return -(-tokens // self.block_size)

    def table(self) -> BlockTable:
        return BlockTable(self.block_size)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for `tokens` positions in all. False and no change if the pool is short."""
        need = self.blocks_for(tokens) - len(table.ids)
        if need > len(self._free):
            return False
        for _ in range(need):
            block = self._free.popleft()
            self._refs[block] = 1
            table.ids.append(block)
        return True

    def share(self, table: BlockTable, blocks: int) -> BlockTable:
        """A new table that holds the first `blocks` blocks of `table` too."""
        shared = BlockTable(self.block_size, table.ids[:blocks])
        for block in shared.ids:
            self._refs[block] += 1
        return shared

    def shrink(self, table: BlockTable, tokens: int) -> None:
        """Give up the blocks behind the first `tokens` positions, last one first."""
        keep = self.blocks_for(tokens)
        for block in reversed(table.ids[keep:]):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)
        del table.ids[keep:]

    def release(self, table: BlockTable) -> None:
        """Give up all blocks of `table`, last one first, so that a prefix stays longest."""
        self.shrink(table, 0)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Assert the law, given every table in use."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.ids:
                held[block] += 1
        assert held == self._refs, "reference counts differ from the tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all((block in free) == (refs == 0) for block, refs in enumerate(self._refs))
