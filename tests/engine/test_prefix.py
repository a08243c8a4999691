"""What was computed before is not computed again, and nobody can tell but by the time it takes."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.kv_cache import KVCache, KVShape
from engine.outcome import FinishReason
from engine.prefix import PrefixCache
from engine.request import Request, SamplingParams, SpeculationParams, StopParams
from engine.types import Drawn, Feed, Model, Sequence
from tests.engine.fakes import BLOCK, VOCAB, PlainText, Rig, reference
from tests.engine.test_runner import TinyRig
from tests.engine.tiny import prompts as tiny_prompts

NEVER = frozenset[int]()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def rig_of(**given: object) -> Rig:
    return Rig(prefix_cache=True, **given)  # type: ignore[arg-type]


def run(rig: Rig, name: str, prompt: Seq[int], tokens: int = 6, **given: object) -> int:
    """Serve it alone, check the output, and return how many prompt tokens were found."""
    rig.submit(name, prompt, tokens, ignore_eos=True, **given)  # type: ignore[arg-type]
    rig.drain()
    assert rig.tokens(name) == reference(prompt, tokens, stop_ids=NEVER)
    return rig.finish(name).cached_tokens


@pytest.mark.parametrize("drafted", [0, 4])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_whole_blocks_are_found_and_the_last_token_is_computed(length: int, drafted: int) -> None:
    rig = rig_of(block_size=16, draft="perfect", max_draft_tokens=drafted, max_step_rows=24)
    prompt = prompt_of(length)
    found = [run(rig, str(i), prompt) for i in range(3)]
    expected = min(length // 16 * 16, length - 1)
    assert found == [0, expected, expected]
    assert rig.copies == (2 if length % 16 == 0 else 0)


@pytest.mark.parametrize("drafts", ["none", "ngram", "perfect"])
def test_hit_or_miss_gives_the_same_ids(drafts: str) -> None:
    """A real model; common beginnings, four rounds, and fewer blocks than all of it needs."""
    rng = random.Random(7)
    bases = tiny_prompts(4, rng, longest=48)
    drawn = [base[: rng.randint(1, 48)] + end for base in bases for end in tiny_prompts(5, rng, 20)]
    drawn += [[5] * 32, [5] * 48, [5] * 64]
    cold = TinyRig("llama", drafts, num_blocks=100).generate(drawn, 12)
    warm = TinyRig("llama", drafts, num_blocks=30, prefix_cache=True)
    for _ in range(4):
        rng.shuffle(order := list(range(len(drawn))))
        got = warm.generate([drawn[i] for i in order], 12)
        assert got == [cold[i] for i in order]
    reports = warm.observer.reports
    assert sum(r.prefix_hits for r in reports) > 500
    assert sum(r.free_blocks == 0 < r.cached_blocks for r in reports) > 10


def test_blocks_are_copied_in_every_layer() -> None:
    cache = KVCache.allocate(KVShape(2, 3, 4, torch.float32), 5, 16, torch.device("cpu"))
    pools = (*cache.k, *cache.v)
    for i, pool in enumerate(pools):
        pool.copy_(torch.rand(pool.shape) + i)
    before = [pool.clone() for pool in pools]
    cache.copy_blocks([(0, 3), (1, 0)])
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool, old[[1, 1, 2, 0, 4]])


def test_a_hit_leaves_the_acceptance_of_a_draft_model_as_it_was() -> None:
    """Draft KV that was computed is found with the target's; what is missing is caught up with."""
    rig = rig_of(draft="perfect", num_blocks=400, max_step_rows=300)
    prompt = prompt_of(256)
    fed = []
    for i in range(3):
        before = rig.draft_model.rows
        run(rig, str(i), prompt, 20)
        drafts = rig.finish(str(i)).drafts
        assert drafts.accepted == drafts.drafted > 0
        fed.append(rig.draft_model.rows - before)
    assert fed[0] > 256
    assert fed[1] == fed[2] < 24


def test_draft_kv_that_is_missing_is_not_taken_for_granted() -> None:
    """The first request drafts nothing, so that only target KV is found by the second."""
    rig = rig_of(draft="perfect", max_step_rows=100)
    prompt = prompt_of(40)
    run(rig, "plain", prompt, speculation=SpeculationParams(0))
    before = rig.draft_model.rows
    assert run(rig, "drafted", prompt, 20) == 39
    assert rig.draft_model.rows - before >= 40
    assert rig.finish("drafted").drafts.accepted == rig.finish("drafted").drafts.drafted > 0


def test_the_output_is_found_too() -> None:
    """A chat goes on: the next prompt begins with the last one and its answer."""
    rig = rig_of()
    prompt = prompt_of(9)
    run(rig, "question", prompt, 20)
    answered = prompt + rig.tokens("question")
    assert run(rig, "next", [*answered, 1, 2]) == (len(answered) - 1) // BLOCK * BLOCK


def test_tenants_and_salts_keep_apart() -> None:
    rig = rig_of()
    prompt = prompt_of(12)
    for tenant, salt, found in [
        ("a", "", 0), ("b", "", 0), ("a", "", 11), ("a", "x", 0), ("ax", "", 0), ("b", "x", 0),
        ("a", "x", 11), ("b", "", 11), ("", "ax", 0), ("", "", 0),
    ]:  # fmt: skip
        name = str(len(rig.chunks))
        assert run(rig, name, prompt, tenant=tenant, cache_salt=salt) == found


def test_another_key_gives_other_names() -> None:
    pool = BlockPool(8, BLOCK)
    one, other = PrefixCache(pool, b"one"), PrefixCache(pool, b"other")
    seq = sequence(pool, [1] * 9)
    pool.grow(seq.table, 9)
    seq.computed = 8
    one.keep(seq, 0)
    assert one.look_up(sequence(pool, [1] * 9)).tokens == 8
    assert other.look_up(sequence(pool, [1] * 9)).tokens == 0


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    rig = rig_of()
    rig.submit("a", prompt := prompt_of(30), 30, ignore_eos=True)
    for _ in range(12):
        rig.step()
    (seq,) = rig.scheduler.running
    computed, rows = seq.computed, rig.target.rows
    rig.scheduler._preempt(seq)
    rig.step()
    assert rig.target.rows - rows == len(seq.tokens) - 1 - computed // BLOCK * BLOCK
    rig.drain()
    assert rig.tokens("a") == reference(prompt, 30, stop_ids=NEVER)
    assert rig.finish("a").cached_tokens == 0  # it has computed all of it, once


def test_a_long_prefix_goes_tail_first() -> None:
    rig = rig_of(num_blocks=20)
    long = prompt_of(48)
    run(rig, "long", long, 1)
    run(rig, "other", prompt_of(40, seed=1), 1)
    found = run(rig, "again", long, 1)
    assert 0 < found < 48
    assert found % BLOCK == 0


def test_a_pool_full_of_finished_work_is_no_burden() -> None:
    rig = rig_of(num_blocks=50, draft="perfect", max_draft_tokens=5, max_step_rows=64)
    for i in range(50):
        run(rig, str(i), prompt_of(20, seed=i), 10)
    assert rig.observer.reports[-1].free_blocks < 5
    run(rig, "big", prompt_of(100, seed=99), 60)
    assert rig.finish("big").preemptions == 0
    assert sum(r.preempted for r in rig.observer.reports) == 0


@pytest.mark.parametrize("spare", [0, 1])
def test_a_prompt_that_is_found_whole_in_a_pool_it_fills(spare: int) -> None:
    """With no room to copy the last block it is written where it is: nobody else has it."""
    rig = rig_of(num_blocks=4 + spare, context_limit=4 * BLOCK)
    prompt = prompt_of(4 * BLOCK)
    assert [run(rig, str(i), prompt, 1) for i in range(3)] == [0, 4 * BLOCK - 1, 4 * BLOCK - 1]
    assert rig.copies == 2 * spare


def test_equal_prompts_at_once_that_hardly_fit() -> None:
    """Found whole by many: each copies the last block, or waits until it can."""
    for blocks in range(5, 12):
        rig = rig_of(num_blocks=blocks, max_step_rows=24)
        prompt = prompt_of(3 * BLOCK)
        for i in range(12):
            rig.submit(str(i), prompt, 7, ignore_eos=True)
        rig.drain()
        for i in range(12):
            assert rig.tokens(str(i)) == reference(prompt, 7, stop_ids=NEVER)
        assert rig.finish("11").cached_tokens == 3 * BLOCK - 1


def test_a_prefill_that_is_found_costs_no_row() -> None:
    rig = rig_of()
    prompt = prompt_of(13)
    for i in range(2):
        rig.submit(str(i), prompt, 0)
        rig.drain()
        assert rig.finish(str(i)).reason is FinishReason.LENGTH
    assert rig.target.rows == 12
    assert rig.finish("1").cached_tokens == 12


def test_the_account_is_exact() -> None:
    """Every known token of a sequence was either fed or found, and the steps report the same."""
    rig = rig_of(num_blocks=400)
    rng = random.Random(8)
    bases = [prompt_of(30, seed=i) for i in range(3)]
    names = [str(i) for i in range(40)]
    for name in names:
        prompt = rng.choice(bases)[: rng.randint(1, 30)] + prompt_of(rng.randint(0, 9))
        rig.submit(name, prompt, rng.randint(1, 9), ignore_eos=True)
        rig.step()
    rig.drain()
    ends = [rig.finish(name) for name in names]
    found = sum(end.cached_tokens for end in ends)
    known = sum(end.prompt_tokens + end.completion_tokens - 1 for end in ends)
    assert found > 200
    assert rig.target.rows == known - found
    assert sum(r.prefix_hits for r in rig.observer.reports) == found
    queries = sum(r.prefix_queries for r in rig.observer.reports)
    assert queries == sum(end.prompt_tokens for end in ends)


def test_without_a_cache_nothing_is_asked_or_kept() -> None:
    rig = Rig()
    for i in range(2):
        assert run(rig, str(i), prompt_of(20)) == 0
    last = rig.observer.reports[-1]
    assert (last.cached_blocks, last.free_blocks) == (0, rig.pool.num_blocks)
    assert sum(r.prefix_queries for r in rig.observer.reports) == 0


def test_flushing_under_load() -> None:
    rig = rig_of(num_blocks=24, draft="ngram")
    rng = random.Random(9)
    prompts = {str(i): prompt_of(16)[: rng.randint(4, 16)] for i in range(30)}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 12, ignore_eos=True)
    while rig.engine.busy:
        rig.step()
        if rng.random() < 0.3:
            rig.pool.flush()
        last = rig.observer.reports[-1]
        assert last.free_blocks + last.cached_blocks + last.used_blocks == rig.pool.num_blocks
    for name, prompt in prompts.items():
        assert rig.tokens(name) == reference(prompt, 12, stop_ids=NEVER)
    rig.pool.flush()
    rig.pool.check([])
    assert (rig.pool.idle, rig.pool.free) == (0, rig.pool.num_blocks)


def test_typing_on_after_a_cancel_finds_what_was_computed() -> None:
    rig = rig_of(draft="ngram", max_step_rows=8)
    rng, text = random.Random(10), prompt_of(250)
    for i in range(200):
        prompt = text[: 10 + i]
        rig.submit(f"cut{i}", prompt, 50, ignore_eos=True)
        for _ in range(rng.randint(0, 4)):
            rig.step()
        rig.engine.cancel(f"cut{i}")
        run(rig, f"full{i}", text[: 11 + i], 4)
    assert sum(rig.finish(f"full{i}").cached_tokens for i in range(200)) > 200 * 90


class Spoilt:
    """A model that gives no numbers for as long as it is told to."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.spoilt = False

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        drawn = self._model.run(feeds)
        return [Drawn((-1,) * len(d.tokens)) for d in drawn] if self.spoilt else drawn


def test_what_a_failed_sequence_computed_is_not_found() -> None:
    models: list[Spoilt] = []

    def wrap(model: Model) -> Model:
        models.append(Spoilt(model))
        return models[0]

    rig = rig_of(wrap=wrap, max_step_rows=8)
    prompt = prompt_of(20)
    rig.submit("bad", prompt, 6, ignore_eos=True)
    rig.step()
    rig.step()
    models[0].spoilt = True
    rig.step()
    models[0].spoilt = False
    assert rig.finish("bad").reason is FinishReason.ERROR
    assert run(rig, "good", prompt) == 0
    assert run(rig, "next", prompt) == 19


# ---- against a plain dictionary --------------------------------------------------------------


def sequence(pool: BlockPool, tokens: Seq[int], tenant: str = "a") -> Sequence:
    request = Request("id", tuple(tokens), StopParams(1), SamplingParams(), tenant=tenant)
    return Sequence(request, list(tokens), pool.table(), PlainText())


texts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=300)
@given(
    kept=st.lists(st.tuples(texts, st.sampled_from("ab"), st.integers(0, 14)), max_size=12),
    asked=texts,
    tenant=st.sampled_from("ab"),
)
def test_it_finds_what_a_dictionary_of_all_prefixes_would(
    kept: list[tuple[list[int], str, int]], asked: list[int], tenant: str
) -> None:
    size = 2
    pool = BlockPool(200, size)
    cache = PrefixCache(pool, b"key")
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for tokens, owner, drafted in kept:
        seq = sequence(pool, tokens, owner)
        pool.grow(seq.table, len(tokens))
        seq.computed = len(tokens) - 1
        seq.drafted = min(drafted, seq.computed)
        cache.keep(seq, 0)
        for end in range(size, seq.computed + 1, size):
            known.setdefault((owner, tuple(tokens[:end])), seq.table.ids[end // size - 1])
        if drafted % 2:
            pool.release(seq.table)
    hit = cache.look_up(sequence(pool, asked, tenant))
    blocks = []
    while (tenant, tuple(asked[: (len(blocks) + 1) * size])) in known:
        if (len(blocks) + 1) * size > len(asked):
            break
        blocks.append(known[tenant, tuple(asked[: (len(blocks) + 1) * size])])
    assert hit.blocks == tuple(blocks)
    assert hit.tokens == min(len(blocks) * size, len(asked) - 1)
    assert 0 <= hit.drafted <= hit.tokens
