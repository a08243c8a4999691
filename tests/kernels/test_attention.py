"""Paged attention: right against plain double arithmetic, and each row the same in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.cpu.library import Library
from tests.kernels.cases import Case, cases, expected, make
from tests.kernels.conftest import libraries

SETTINGS = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# What multiplies pairs of bf16 rounds the softmax weights too, each by 2^-9 at most.
ROUNDS_WEIGHTS = ("avx512bf16", "amx", "amx_emulated")


def assert_right(case: Case, out: torch.Tensor, isa: str = "") -> None:
    """float32 to 2e-6 of the values' size (they are standard normal); bf16 to its own rounding."""
    right = expected(case)
    if case.q.dtype == torch.float32:
        torch.testing.assert_close(out.double(), right, rtol=2e-6, atol=2e-6)
    else:
        atol = 8e-3 if isa in ROUNDS_WEIGHTS else 2e-3
        torch.testing.assert_close(out.double(), right, rtol=2**-8, atol=atol)


@SETTINGS
@given(case=cases())
def test_reference_is_attention(case: Case):
    assert_right(case, case.run(reference.paged_attention))


@SETTINGS
@given(case=cases())
def test_every_instruction_set_is_attention(library: Library, case: Case):
    assert_right(case, case.run(library.paged_attention), library.isa)


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_sizes(library: Library, dim: int, dtype: torch.dtype):
    case = make([37], [3], heads=4, kv_heads=2, dim=dim, dtype=dtype)
    assert_right(case, case.run(library.paged_attention), library.isa)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_rows_that_see_nothing_in_common(library: Library, window: int):
    case = make([40], [13], heads=2, kv_heads=2, window=window)
    assert_right(case, case.run(library.paged_attention), library.isa)


def test_more_rows_of_a_head_than_a_tile(library: Library):
    case = make([40, 300], [2, 1], heads=40, kv_heads=1, dim=32)
    assert_right(case, case.run(library.paged_attention), library.isa)


def test_a_chunk_of_a_prompt(library: Library):
    case = make([300], [300], heads=6, kv_heads=2, dim=32, dtype=torch.bfloat16)
    assert_right(case, case.run(library.paged_attention), library.isa)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN, and zero does not equal minus zero."""
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.view(kind), b.view(kind))


@SETTINGS
@given(data=st.data(), case=cases())
def test_a_row_has_its_bits_in_any_company(library: Library, data: st.DataObject, case: Case):
    """Whichever sequences are in the step, in whichever order."""
    out = case.run(library.paged_attention)
    starts = case.cu_query.tolist()
    order = data.draw(st.permutations(range(len(starts) - 1)))
    order = order[: data.draw(st.integers(1, len(order)))]
    there = torch.cat([out[starts[s] : starts[s + 1]] for s in order])
    assert same_bits(case.only(order).run(library.paged_attention), there)


@SETTINGS
@given(data=st.data(), case=cases())
def test_a_row_has_its_bits_in_any_chunk(library: Library, data: st.DataObject, case: Case):
    """Decoded alone, verified with its neighbours, or part of a prompt's chunk."""
    out = case.run(library.paged_attention)
    starts = case.cu_query.tolist()
    sequence = data.draw(st.sampled_from([s for s, n in enumerate(case.cu_query.diff()) if n > 0]))
    count = starts[sequence + 1] - starts[sequence]
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    part = case.rows(sequence, first, last).run(library.paged_attention)
    assert same_bits(part, out[starts[sequence] + first : starts[sequence] + last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads_or_pages(library: Library, dtype: torch.dtype):
    case = make([600, 17, 300, 256], [5, 1, 40, 3], dtype=dtype)
    out = case.run(library.paged_attention)
    threads = torch.get_num_threads()
    try:
        for other in (1, 2, 3):
            torch.set_num_threads(other)
            assert same_bits(case.run(library.paged_attention), out)
    finally:
        torch.set_num_threads(threads)
    turn = torch.arange(len(case.v_cache)).roll(3)
    moved = replace(
        case,
        k_cache=case.k_cache[turn].contiguous(),
        v_cache=case.v_cache[turn].contiguous(),
        block_tables=turn.argsort().int()[case.block_tables.long()],
    )
    assert same_bits(moved.run(library.paged_attention), out)


def test_a_later_row_cannot_poison_an_earlier_one(library: Library):
    """A NaN that only the last row sees reaches that row alone, through K and through V."""
    case = make([20], [4], heads=3, kv_heads=1)
    clean = case.run(library.paged_attention)
    block, offset = case.block_tables[0, 1], 19 % 16
    for cache in (
        case.k_cache[block, :, :, offset],
        case.v_cache[block, :, offset // 2, :, offset % 2],
    ):
        before = cache.clone()
        cache.fill_(torch.nan)
        out = case.run(library.paged_attention)
        cache.copy_(before)
        assert same_bits(out[:3], clean[:3])
        assert out[3].isnan().all()


def test_a_later_bad_scale_cannot_poison_an_earlier_row(library: Library):
    case = make([20], [4], heads=3, kv_heads=1).int8()
    clean = case.run(library.paged_attention)
    for scale in (case.k_scale, case.v_scale):
        assert scale is not None
        before = scale.clone()
        scale[case.block_tables[0, 1], :, 19 % 16] = torch.nan
        out = case.run(library.paged_attention)
        scale.copy_(before)
        assert same_bits(out[:3], clean[:3])
        assert out[3].isnan().all()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("count", [*range(1, 41)])
def test_a_row_has_its_bits_in_a_chunk_of_any_length(library: Library, count: int, int8: bool):
    """At every position in a tile, with neighbours that see more and less than it does."""
    case = make([300], [40], heads=6, kv_heads=2, dim=32, dtype=torch.bfloat16)
    case = case.int8() if int8 else case
    out = case.run(library.paged_attention)
    for first in {0, (40 - count) // 2, 40 - count}:
        part = case.rows(0, first, first + count).run(library.paged_attention)
        assert same_bits(part, out[first : first + count])


def test_a_bad_query_stays_alone(library: Library):
    case = make([20, 20], [2, 2], heads=3, kv_heads=1)
    clean = case.run(library.paged_attention)
    case.q[1, 0] = torch.nan
    out = case.run(library.paged_attention)
    assert out[1, 0].isnan().all()
    assert same_bits(out[1, 1:], clean[1, 1:])
    assert same_bits(out[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("size", [1e-30, 1e-3, 30.0, 300.0])
def test_scores_of_any_size(library: Library, size: float):
    case = make([300], [2], heads=3, kv_heads=1)
    case.q.mul_(size)
    torch.testing.assert_close(
        case.run(library.paged_attention).double(),
        expected(case),
        rtol=1e-4,
        atol=1e-5 * size + 1e-5,
    )


def test_strided_queries_and_output(library: Library):
    """q is a view into a fused projection, out a view into a wider buffer."""
    case = make([33, 5], [2, 3], dtype=torch.bfloat16)
    fused = torch.randn(5, 15, 64).bfloat16()
    fused[:, 3:12] = case.q
    wide = torch.zeros(5, 11, 64).bfloat16()
    library.paged_attention(
        fused[:, 3:12],
        case.k_cache,
        case.v_cache,
        wide[:, 1:10],
        case.block_tables,
        case.cu_query,
        case.context_lens,
        case.scale,
    )
    assert same_bits(wide[:, 1:10].contiguous(), case.run(library.paged_attention))
    assert not wide[:, [0, 10]].any()


def test_no_sequences(library: Library):
    case = replace(
        make([5], [1]),
        q=torch.zeros(0, 9, 64),
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        cu_query=torch.zeros(1, dtype=torch.int32),
        context_lens=torch.zeros(0, dtype=torch.int32),
    )
    assert case.run(library.paged_attention).shape == (0, 9, 64)


def wrong_inputs() -> list[tuple[str, dict[str, torch.Tensor]]]:
    case = make([5], [1])
    return [
        ("head size", {"q": torch.zeros(1, 9, 24)}),
        ("do not share", {"q": torch.zeros(1, 8, 64)}),
        ("another dtype", {"q": case.q.bfloat16()}),
        ("int32", {"context_lens": case.context_lens.long()}),
        ("int32", {"cu_query": case.cu_query.long()}),
        ("longer", {"cu_query": torch.zeros(3, dtype=torch.int32)}),
        ("table each", {"block_tables": torch.zeros(2, 1, dtype=torch.int32)}),
        ("k_cache", {"k_cache": case.k_cache[:, :, :16]}),
        ("v_cache", {"v_cache": case.v_cache[:, :, :4]}),
        ("one scale alone", {"k_scale": torch.zeros(3, 3, 16)}),
        ("not int8", {"k_scale": torch.zeros(3, 3, 16), "v_scale": torch.zeros(3, 3, 16)}),
        ("not contiguous", {"v_cache": case.v_cache.transpose(2, 3).contiguous().transpose(2, 3)}),
    ]


@pytest.mark.parametrize(("message", "change"), wrong_inputs())
def test_wrong_inputs_are_refused(message: str, change: dict[str, torch.Tensor]):
    library = next(iter(libraries().values()))
    with pytest.raises(ValueError, match=message):
        replace(make([5], [1]), **change).run(library.paged_attention)
