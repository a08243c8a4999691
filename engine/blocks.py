"""Physical KV blocks: who owns which, and what they hold. Whoever reserves also releases, once.

A block whose last owner leaves keeps its content if that was stored under a name: it may be
found again until somebody needs the room (least recently used first).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.types import BlockTable


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens with reference counts.

    Law: every block is held by as many tables as it has references; without any it is empty, or
    idle if its content has a name. A block that is shared or whose content has a name must not be
    written: `own` it first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._empty: deque[int] = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._copies: dict[int, int] = {}
        # How many tokens of each block, from its first on, have valid KV of the draft model too.
        self.drafted = [0] * num_blocks

    @property
    def free(self) -> int:
        """Blocks that can be had now: empty or idle."""
        return len(self._empty) + len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks that nobody holds but that may be found by name."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` positions need."""
        return -(-tokens // self.block_size)

    def table(self) -> BlockTable:
        return BlockTable(self.block_size)

    # ---- owning ------------------------------------------------------------------------------

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for `tokens` positions in all. False and no change if the pool is short."""
        need = self.blocks_for(tokens) - len(table.ids)
        if need > self.free:
            return False
        for _ in range(need):
            table.ids.append(self._take())
        return True

    def hold(self, table: BlockTable, blocks: Iterable[int]) -> None:
        """`table` goes on with `blocks`, shared with whoever else holds them."""
        for block in blocks:
            if not self._refs[block]:
                del self._idle[block]
            self._refs[block] += 1
            table.ids.append(block)

    def held(self, block: int) -> bool:
        return self._refs[block] > 0

    def own(self, table: BlockTable, position: int) -> bool:
        """See to it that the block of `position`, if `table` has one there, may be written.

        A copy takes the place of one that may not; it is to be made before the next pass (see
        `take_copies`). False and no change if the pool is short.
        """
        index = position // self.block_size
        if index >= len(table.ids):
            return True
        block = table.ids[index]
        if self._refs[block] == 1:
            if self._names[block] is None:
                return True
            if not self.free:  # no room for a copy, but nobody else has it: lose the name
                self._unname(block)
                return True
        elif not self.free:
            return False
        fresh = self._take()
        self._copies[fresh] = block
        self.drafted[fresh] = self.drafted[block]
        table.ids[index] = fresh
        self._drop(block)
        return True

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(from, to) of the copies that became due since the last call. All of them read what the
        blocks held before any of them is made, and before the next pass writes."""
        copies = tuple((block, fresh) for fresh, block in self._copies.items())
        self._copies.clear()
        return copies

    def shrink(self, table: BlockTable, tokens: int) -> None:
        """Give up the blocks behind the first `tokens` positions, last one first."""
        keep = self.blocks_for(tokens)
        if keep < len(table.ids):
            for block in reversed(table.ids[keep:]):
                self._drop(block)
            del table.ids[keep:]

    def release(self, table: BlockTable) -> None:
        """Give up all blocks of `table`, last one first, so that a prefix stays longest."""
        self.shrink(table, 0)

    # ---- content -----------------------------------------------------------------------------

    def find(self, name: bytes) -> int | None:
        """The block whose content has this name."""
        return self._by_name.get(name)

    def store(self, block: int, name: bytes) -> None:
        """The content of a block that is held is final, and is what `name` says. The first block
        of a name keeps it."""
        if self._names[block] is None and name not in self._by_name:
            self._names[block] = name
            self._by_name[name] = block

    def unname(self, table: BlockTable) -> None:
        """Let what the blocks of `table` hold never be found again."""
        for block in table.ids:
            self._unname(block)

    def _unname(self, block: int) -> None:
        name, self._names[block] = self._names[block], None
        if name is not None:
            del self._by_name[name]
            if block in self._idle:
                del self._idle[block]
                self._empty.append(block)

    def flush(self) -> None:
        """Forget all content. Those who hold blocks are not affected."""
        for block in list(self._by_name.values()):
            self._unname(block)

    def _take(self) -> int:
        """An empty block for one owner, if need be the idle one that was unused for longest."""
        if not self._empty:
            self._unname(next(iter(self._idle)))
        block = self._empty.popleft()
        self._refs[block] = 1
        self.drafted[block] = 0
        return block

    def _drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._names[block] is None:
                self._empty.append(block)
            else:
                self._idle[block] = None

    def check(self, tables: Seq[BlockTable]) -> None:
        """Assert the law, given every table in use."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.ids:
                held[block] += 1
        assert held == self._refs, "reference counts differ from the tables"
        empty, idle = set(self._empty), set(self._idle)
        assert len(empty) == len(self._empty), "a block is empty twice"
        for block, (refs, name) in enumerate(zip(self._refs, self._names, strict=True)):
            assert (block in empty) == (refs == 0 and name is None)
            assert (block in idle) == (refs == 0 and name is not None)
            assert 0 <= self.drafted[block] <= self.block_size
        named = {name: block for block, name in enumerate(self._names) if name is not None}
        assert named == self._by_name, "a name leads elsewhere"
