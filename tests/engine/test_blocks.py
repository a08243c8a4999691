"""No block has two writers, none is lost, none is freed while someone holds it."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from engine.types import BlockTable

BLOCKS, SIZE = 12, 4


class World:
    """A pool, its tables, and memory in which every owner has signed its blocks.

    If a held block is ever handed to a second owner, that one's signature is found in it.
    """

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS, SIZE)
        self.tables: list[BlockTable] = []
        self.signed: list[list[int]] = []
        self.memory = [0] * BLOCKS
        self._last = 0

    def open(self) -> None:
        self.tables.append(self.pool.table())
        self.signed.append([])

    def grow(self, which: int, tokens: int) -> None:
        table = self.tables[which]
        before, free = list(table.ids), self.pool.free
        need = max(0, -(-tokens // SIZE) - len(before))
        assert self.pool.grow(table, tokens) == (need <= free)
        assert table.ids[: len(before)] == before
        assert (
            len(table.ids) - len(before) == free - self.pool.free == (need if need <= free else 0)
        )
        for block in table.ids[len(before) :]:
            self._last += 1
            self.memory[block] = self._last
            self.signed[which].append(self._last)

    def share(self, which: int, blocks: int) -> None:
        self.tables.append(self.pool.share(self.tables[which], blocks))
        self.signed.append(self.signed[which][:blocks])

    def shrink(self, which: int, tokens: int) -> None:
        keep = -(-tokens // SIZE)
        self.pool.shrink(self.tables[which], tokens)
        del self.signed[which][keep:]

    def release(self, which: int) -> None:
        self.pool.release(self.tables[which])
        assert self.tables.pop(which).ids == []
        self.signed.pop(which)

    def check(self) -> None:
        self.pool.check(self.tables)
        held = {block for table in self.tables for block in table.ids}
        assert self.pool.free == BLOCKS - len(held)
        for table, signed in zip(self.tables, self.signed, strict=True):
            assert [self.memory[block] for block in table.ids] == signed
            assert len(set(table.ids)) == len(table.ids)


class BlocksMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule()
    def open(self) -> None:
        self.world.open()

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data(), tokens=st.integers(0, BLOCKS * SIZE + 3))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        self.world.grow(self._any(data), tokens)

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data(), blocks=st.integers(0, BLOCKS))
    def share(self, data: st.DataObject, blocks: int) -> None:
        self.world.share(self._any(data), blocks)

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data(), tokens=st.integers(0, BLOCKS * SIZE))
    def shrink(self, data: st.DataObject, tokens: int) -> None:
        self.world.shrink(self._any(data), tokens)

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.world.release(self._any(data))

    @invariant()
    def lawful(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        while self.world.tables:
            self.world.release(0)
        self.world.check()
        assert self.world.pool.free == BLOCKS

    def _any(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.world.tables) - 1))


TestBlocks = BlocksMachine.TestCase


def test_a_hundred_thousand_operations_lose_nothing() -> None:
    rng, world = random.Random(0), World()
    for _ in range(100_000):
        deed = rng.choice(("open", "grow", "grow", "share", "shrink", "release"))
        if deed == "open" or not world.tables:
            if len(world.tables) < 6:
                world.open()
            continue
        which = rng.randrange(len(world.tables))
        if deed == "grow":
            world.grow(which, rng.randint(0, BLOCKS * SIZE))
        elif deed == "share" and len(world.tables) < 6:
            world.share(which, rng.randint(0, BLOCKS))
        elif deed == "shrink":
            world.shrink(which, rng.randint(0, BLOCKS * SIZE))
        else:
            world.release(which)
        world.check()


def test_growing_is_all_or_nothing() -> None:
    pool = BlockPool(3, SIZE)
    first, second = pool.table(), pool.table()
    assert pool.grow(first, 2 * SIZE)
    assert not pool.grow(second, SIZE + 1)
    assert (second.ids, pool.free) == ([], 1)
    assert pool.grow(second, SIZE)
    assert pool.free == 0
    assert not pool.grow(first, 2 * SIZE + 1)
    assert len(first.ids) == 2


def test_room_that_is_there_costs_nothing() -> None:
    pool = BlockPool(2, SIZE)
    table = pool.table()
    assert pool.grow(table, 1)
    assert pool.grow(table, SIZE)
    assert pool.grow(table, 0)
    assert pool.free == 1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(1, SIZE).blocks_for(tokens) == blocks


def test_slots_follow_the_table() -> None:
    table = BlockTable(SIZE, [7, 2])
    assert [table.slot(p) for p in range(8)] == [28, 29, 30, 31, 8, 9, 10, 11]
    assert table.capacity == 8


def test_shared_blocks_outlive_their_first_owner() -> None:
    pool = BlockPool(4, SIZE)
    first = pool.table()
    pool.grow(first, 3 * SIZE)
    kept = first.ids[:2]
    second = pool.share(first, 2)
    pool.release(first)
    assert pool.free == 2
    third = pool.table()
    assert pool.grow(third, 2 * SIZE)
    assert not set(third.ids) & set(kept)
    assert second.ids == kept


def test_the_law_is_enforced() -> None:
    def pool_and_table() -> tuple[BlockPool, BlockTable]:
        pool = BlockPool(4, SIZE)
        table = pool.table()
        pool.grow(table, SIZE)
        return pool, table

    pool, table = pool_and_table()
    with pytest.raises(AssertionError):
        pool.check([])  # a table that nobody holds any more: a leak
    with pytest.raises(AssertionError):
        pool.check([table, table])  # two owners, one reference
    pool.release(BlockTable(SIZE, list(table.ids)))
    with pytest.raises(AssertionError):
        pool.check([table])  # in use, but free
    pool, table = pool_and_table()
    pool.release(BlockTable(SIZE, list(table.ids)))
    pool.release(BlockTable(SIZE, list(table.ids)))
    with pytest.raises(AssertionError):
        pool.check([])  # released twice
