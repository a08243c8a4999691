"""What test_triton.py runs under the interpreter.

float32 and float16: the interpreter multiplies the bit patterns of bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from kernels.triton.paged_attention import TILE, paged_attention
from tests.kernels.cases import Case, expected, make


@pytest.fixture(autouse=True, scope="module")
def _dots_whose_rows_do_not_know_their_place() -> Iterator[None]:
    """As on a device. The interpreter leaves them to numpy's matmul, and that to a BLAS, some of
    which add up a row in another order at another place of a matrix.
    """

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        products = a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :]
        return products.sum(axis=-2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "np", SimpleNamespace(**{**vars(np), "matmul": matmul}))
        yield


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    lengths = st.sampled_from([1, 15, 16, 17, TILE - 1, TILE, TILE + 1, 90])
    contexts = draw(st.lists(lengths, min_size=1, max_size=3))
    queries = [draw(st.integers(0, min(c, 7))) for c in contexts]
    queries[0] = max(queries[0], 1)
    kv_heads = draw(st.integers(1, 2))
    return make(
        contexts,
        queries,
        heads=kv_heads * draw(st.integers(1, 9)),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([32, 64, 80])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        window=draw(st.sampled_from([0, 0, 1, 16, 70])),
        seed=draw(st.integers(0, 2**31)),
    )


def check(case: Case) -> None:
    out = case.run(paged_attention).double()
    tight = case.q.dtype == torch.float32
    tolerance = {"rtol": 3e-6, "atol": 3e-6} if tight else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(out, expected(case), **tolerance)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=small_cases())
def test_it_is_attention(case: Case):
    check(case)


@pytest.mark.parametrize("queries", [[40], [70, 1, 33]])
def test_chunks_of_prompts(queries: list[int]):
    check(make([n + 3 for n in queries], queries, heads=6, kv_heads=2, dim=32))


def test_more_heads_than_rows():
    check(make([20, 5], [2, 1], heads=20, kv_heads=1, dim=32))


@pytest.mark.parametrize("window", [0, 20])
def test_a_row_has_its_bits_in_any_company(window: int):
    case = make([150, 17, 70], [5, 1, 7], window=window)
    out = case.run(paged_attention)
    assert torch.equal(case.only([2, 0]).run(paged_attention), torch.cat([out[6:], out[:5]]))
    for row in range(5):
        assert torch.equal(case.rows(0, row, row + 1).run(paged_attention), out[row : row + 1])


def test_strided_queries_and_output():
    case = make([33, 5], [2, 3])
    fused, wide = torch.zeros(5, 15, 64), torch.zeros(5, 11, 64)
    fused[:, 3:12] = case.q
    out = wide[:, 1:10]
    replace(case, q=fused[:, 3:12]).run(
        lambda q, k, v, _, *rest: paged_attention(q, k, v, out, *rest)
    )
    assert torch.equal(out, case.run(paged_attention))
    assert not wide[:, [0, 10]].any()
