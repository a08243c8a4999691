"""No block has two writers, none is lost, none is freed while someone holds it, and what is found
by name is what was stored under it."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from engine.types import BlockTable

BLOCKS, SIZE = 12, 4


def name(signature: int) -> bytes:
    return signature.to_bytes(8, "little")


class World:
    """A pool, its tables, and memory in which every writer signs the blocks it writes.

    If a block that others hold or may find is ever written, the wrong signature is found in it.
    Beside it a plain model of what must be found: `named` signatures, of which `idle` ones are held
    by nobody, least recently used first.
    """

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS, SIZE)
        self.tables: list[BlockTable] = []
        self.signed: list[list[int]] = []
        self.memory = [0] * BLOCKS
        self.named: set[int] = set()
        self.idle: list[int] = []
        self._last = 0

    # ---- deeds: each does the same to the pool and to the model ------------------------------

    def open(self) -> None:
        self.tables.append(self.pool.table())
        self.signed.append([])

    def grow(self, which: int, tokens: int) -> None:
        table = self.tables[which]
        before, free = list(table.ids), self.pool.free
        need = max(0, -(-tokens // SIZE) - len(before))
        self._room(need)
        assert self.pool.grow(table, tokens) == (need <= free)
        assert table.ids[: len(before)] == before
        assert len(table.ids) - len(before) == (need if need <= free else 0)
        for block in table.ids[len(before) :]:
            self.signed[which].append(self._sign(block))

    def share(self, which: int, blocks: int) -> None:
        ids = self.tables[which].ids[:blocks]
        self.open()
        self.pool.hold(self.tables[-1], ids)
        self.signed[-1] = self.signed[which][:blocks]

    def begin_with(self, signatures: Seq[int]) -> None:
        """A new table on blocks that are found by name."""
        found = [self.pool.find(name(s)) for s in signatures]
        self.open()
        self.pool.hold(self.tables[-1], [block for block in found if block is not None])
        self.signed[-1] = list(signatures)
        self.idle = [s for s in self.idle if s not in signatures]

    def write(self, which: int, position: int) -> None:
        table, index = self.tables[which], position // SIZE
        if index >= len(table.ids):
            assert self.pool.own(table, position)
            return
        signature, free = self.signed[which][index], self.pool.free
        shared = self._holders(table.ids[index]) > 1
        if free and (shared or signature in self.named):
            self._room(1)
            self.idle += [] if shared else [signature]
        elif not shared:
            self.named.discard(signature)
        assert self.pool.own(table, position) == (not shared or free > 0)
        if shared and not free:
            return
        for source, target in self.pool.take_copies():
            self.memory[target] = self.memory[source]
        assert self.memory[table.ids[index]] == signature
        self.signed[which][index] = self._sign(table.ids[index])

    def store(self, which: int, index: int) -> None:
        if index < len(self.tables[which].ids):
            signature = self.signed[which][index]
            self.pool.store(self.tables[which].ids[index], name(signature))
            self.pool.store(self.tables[which].ids[index], b"a second name")
            self.named.add(signature)

    def unname(self, which: int) -> None:
        self.pool.unname(self.tables[which])
        self.named -= set(self.signed[which])

    def flush(self) -> None:
        self.pool.flush()
        self.named.clear()
        self.idle.clear()

    def shrink(self, which: int, tokens: int) -> None:
        keep = -(-tokens // SIZE)
        for block, signature in reversed(
            list(zip(self.tables[which].ids, self.signed[which], strict=True))[keep:]
        ):
            if self._holders(block) == 1 and signature in self.named:
                self.idle.append(signature)
        self.pool.shrink(self.tables[which], tokens)
        del self.signed[which][keep:]

    def release(self, which: int) -> None:
        self.shrink(which, 0)
        assert self.tables.pop(which).ids == []
        self.signed.pop(which)

    # ---- what must be so ---------------------------------------------------------------------

    def check(self) -> None:
        self.pool.check(self.tables)
        held = {block for table in self.tables for block in table.ids}
        assert self.pool.free == BLOCKS - len(held)
        assert self.pool.idle == len(self.idle)
        for table, signed in zip(self.tables, self.signed, strict=True):
            assert [self.memory[block] for block in table.ids] == signed
            assert len(set(table.ids)) == len(table.ids)
        for signature in {*self.named, *range(max(1, self._last - 40), self._last + 1)}:
            block = self.pool.find(name(signature))
            assert (block is not None) == (signature in self.named)
            assert block is None or self.memory[block] == signature

    def _sign(self, block: int) -> int:
        self._last += 1
        self.memory[block] = self._last
        return self._last

    def _holders(self, block: int) -> int:
        return sum(block in table.ids for table in self.tables)

    def _room(self, need: int) -> None:
        """The model's part of handing out `need` blocks: empty ones first, then the oldest idle."""
        if need <= self.pool.free:
            for _ in range(need - (self.pool.free - len(self.idle))):
                self.named.discard(self.idle.pop(0))


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

    @precondition(lambda self: self.world.named)
    @rule(data=st.data())
    def begin_with(self, data: st.DataObject) -> None:
        names = st.lists(st.sampled_from(sorted(self.world.named)), unique=True)
        self.world.begin_with(data.draw(names))

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data(), position=st.integers(0, BLOCKS * SIZE))
    def write(self, data: st.DataObject, position: int) -> None:
        self.world.write(self._any(data), position)

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data(), index=st.integers(0, BLOCKS))
    def store(self, data: st.DataObject, index: int) -> None:
        self.world.store(self._any(data), index)

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data())
    def unname(self, data: st.DataObject) -> None:
        self.world.unname(self._any(data))

    @rule()
    def flush(self) -> None:
        self.world.flush()

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
    few = {"open", "share", "begin_with"}
    often = ["grow", "store", "store", "store", "release"]
    for _ in range(100_000):
        deed = rng.choice([*few, *often, "grow", "write", "shrink", "release", "flush"])
        if (deed == "flush" and rng.random() < 0.95) or (deed in few and len(world.tables) == 6):
            continue
        if deed in ("open", "flush"):
            getattr(world, deed)()
        elif deed == "begin_with":
            named = sorted(world.named)
            world.begin_with(rng.sample(named, rng.randint(0, len(named))))
        elif world.tables:
            which = rng.randrange(len(world.tables))
            most = BLOCKS if deed in ("share", "store") else BLOCKS * SIZE
            getattr(world, deed)(which, *([rng.randint(0, most)] if deed != "release" else ()))
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


def test_shared_blocks_outlive_their_first_owner() -> None:
    pool = BlockPool(4, SIZE)
    first = pool.table()
    pool.grow(first, 3 * SIZE)
    kept = first.ids[:2]
    second = pool.table()
    pool.hold(second, kept)
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
