"""The same request gives the same ids, whatever it is computed with, and by how many at a time.

In float32: the linears' last bits may still depend on the number of rows here, so a draw between
two tokens that are as good as equal could fall either way. The models' weights are such that the
closest two in these tests are far apart.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache

import pytest

from engine.ngram_count import count
from engine.ngram_table import NgramTable
from engine.request import Request, SamplingParams, SpeculationParams, StopParams
from tests.engine.test_runner import TinyRig
from tests.engine.tiny import VOCAB, paged, prompts, tiny

TOKENS = 30
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, top_k=5, seed=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(temperature=1.3, min_p=0.05, seed=4),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=2**64 - 1),
)


def request(i: int, prompt: Seq[int], sampling: SamplingParams) -> Request:
    return Request(str(i), tuple(prompt), StopParams(TOKENS), sampling, arrived=float(i))


@cache
def requests() -> tuple[Request, ...]:
    drawn = prompts(12, random.Random(3))
    return tuple(request(i, p, SAMPLINGS[i % len(SAMPLINGS)]) for i, p in enumerate(drawn))


@cache
def alone() -> tuple[tuple[int, ...], ...]:
    """Each request by itself, without drafts, its prompt in one piece."""
    rig = TinyRig("llama", "none", rows=128)
    return tuple(tuple(rig.serve([replace(r, id="0")])[0]) for r in requests())


def in_company(rig: TinyRig) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, rig.serve(requests())))


@pytest.mark.parametrize("drafted", range(7))
@pytest.mark.parametrize("drafts", ["ngram", "model", "ngram,perfect"])
def test_with_any_number_of_drafts(drafts: str, drafted: int) -> None:
    rig = TinyRig("llama", drafts, drafted=drafted)
    assert in_company(rig) == alone()
    assert (sum(r.drafted for r in rig.observer.reports) > 0) == (drafted > 0)


@cache
def table() -> NgramTable:
    """Counted from what the model says, and from what it does not: often right, often wrong."""
    others = [[(t * 7 + step) % VOCAB for t in range(40)] for step in range(20)]
    documents = [*alone(), *alone()[:6], *others]
    return NgramTable(VOCAB, count(documents, VOCAB, 1 << 20))


@pytest.mark.parametrize("drafted", [1, 3, 6])
@pytest.mark.parametrize("drafts", ["suffix", "table", "ngram,suffix,table", "suffix,model"])
def test_with_what_was_said_before(drafts: str, drafted: int) -> None:
    """Again and again, so that all of it was said before; and with few blocks."""
    for blocks in (64, 14):
        rig = TinyRig("llama", drafts, drafted=drafted, num_blocks=blocks, table=table())
        for _ in range(2):
            assert in_company(rig) == alone()
        by_source = {name for r in rig.observer.reports for name, s in r.by_source if s.accepted}
        assert by_source & {"suffix", "table"}
        drafted_in_all = sum(r.drafted for r in rig.observer.reports)
        assert 0 < sum(r.accepted for r in rig.observer.reports) < drafted_in_all


@pytest.mark.parametrize("rows", [12, 13, 16, 31, 128])
def test_with_any_size_of_chunks(rows: int) -> None:
    assert in_company(TinyRig("llama", "ngram", rows=rows, max_seqs=12)) == alone()


@pytest.mark.parametrize("max_seqs", [1, 2, 5])
def test_with_any_number_of_neighbours(max_seqs: int) -> None:
    assert in_company(TinyRig("llama", "ngram", max_seqs=max_seqs)) == alone()


def test_with_preemptions() -> None:
    rig = TinyRig("llama", "perfect", num_blocks=14)
    assert in_company(rig) == alone()
    assert sum(r.preempted for r in rig.observer.reports) > 0


def test_with_drafts_of_each_requests_own_choice() -> None:
    rig = TinyRig("llama", "ngram,model", drafted=6)
    chosen = [replace(r, speculation=SpeculationParams(i % 7)) for i, r in enumerate(requests())]
    assert tuple(map(tuple, rig.serve(chosen))) == alone()


def test_one_seed_idle_and_among_others() -> None:
    sampling = SamplingParams(temperature=2.0, seed=42)
    prompt, *others = prompts(9, random.Random(4))
    rig = TinyRig("llama", "ngram")
    runs = [rig.serve([request(0, prompt, sampling)])[0] for _ in range(5)]
    for n in range(5):
        unseeded = [
            request(i + 1, p, SamplingParams(temperature=1.0, seed=1000 * n + i))
            for i, p in enumerate(others)
        ]
        runs.append(rig.serve([request(0, prompt, sampling), *unseeded])[0])
    assert all(run == runs[0] for run in runs)


def test_other_seeds_and_other_tenants_of_a_seed() -> None:
    """A seed is no constant: seeds differ from each other, and positions within one."""
    prompt = prompts(1, random.Random(5))[0]
    outputs = TinyRig("llama", "none").serve(
        [request(i, prompt, SamplingParams(temperature=1.0, seed=i)) for i in range(12)]
    )
    assert len({tuple(o) for o in outputs}) == 12
    assert all(len(set(o)) > 3 for o in outputs)


def test_nearly_greedy_neighbours_stay_nearly_greedy() -> None:
    drawn = prompts(8, random.Random(6))
    rig = TinyRig("llama", "model")
    greedy = [rig.serve([request(0, p, SAMPLINGS[0])])[0] for p in drawn]
    cold = [request(i, p, SamplingParams(1e-4, seed=i % 4)) for i, p in enumerate(drawn)]
    assert rig.serve(cold) == greedy
    assert all(len(set(ids)) > 1 for ids in greedy)


PATHOLOGICAL = (
    [5] * 48,
    [7],
    [8, 9] * 8,
    list(range(3, 19)),
    list(range(3, 20)),
    list(range(3, 18)),
    [11] * 32,
    [3, 4, 5] * 16,
)


@pytest.mark.parametrize("drafted", [1, 2, 5, 8])
@pytest.mark.parametrize("max_seqs", [1, 8])
@pytest.mark.parametrize("drafts", ["ngram", "model"])
def test_prompts_that_invite_drafts_or_end_at_a_block(
    drafts: str, max_seqs: int, drafted: int
) -> None:
    rig = TinyRig("llama", drafts, drafted=drafted, max_seqs=max_seqs)
    drawn = [request(i, p, SAMPLINGS[i % 2]) for i, p in enumerate(PATHOLOGICAL)]
    assert rig.serve(drawn) == _plain_pathological()


@cache
def _plain_pathological() -> list[list[int]]:
    drawn = [request(0, p, SAMPLINGS[i % 2]) for i, p in enumerate(PATHOLOGICAL)]
    rig = TinyRig("llama", "none")
    return [rig.serve([r])[0] for r in drawn]


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    """Embedding rows that the tokenizer does not know, and here they score highest of all."""
    model = tiny("llama")
    model.lm_head.weight[VOCAB - 20 :] *= 20.0
    rig = TinyRig("llama", "none")
    rig.engine._model = paged(model, 64, vocab=VOCAB - 20)
    outputs = rig.serve(requests())
    assert max(max(ids) for ids in outputs) < VOCAB - 20
    assert len({tuple(ids) for ids in outputs}) == 12
