"""The sampler: its law, its supports, and the same ids from torch and from C++."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.library import Library
from tests.kernels.conftest import NAMES, libraries

Sampler = Callable[..., Tensor]


def draw(sampler: Sampler, logits: Tensor, **columns: object) -> Tensor:
    """One id per row; each column is a value for all rows, or one a row."""
    rows = len(logits)

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(columns.get(name, default), dtype=dtype).expand(rows).contiguous()

    return sampler(
        logits,
        column("temperature", 1.0, torch.float64),
        column("top_k", 0, torch.int64),
        column("top_p", 1.0, torch.float64),
        column("min_p", 0.0, torch.float64),
        column("seed", 0, torch.int64),
        column("position", 0, torch.int64),
    )


@pytest.fixture(params=["reference", *NAMES])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    if request.param == "reference":
        return reference.sample_rows
    if request.param not in libraries():
        pytest.skip(f"no {request.param} here")
    return libraries()[request.param].sample_rows


def support(sampler: Sampler, logits: Tensor, draws: int = 200, **columns: object) -> set[int]:
    """The ids seen over many positions."""
    rows = logits.expand(draws, -1)
    return set(draw(sampler, rows, position=torch.arange(draws), **columns).tolist())


@pytest.mark.parametrize("vocabulary", [1, 3, 63, 64, 65, 1000, 4999, 49152])
def test_cpp_draws_what_the_reference_draws(library: Library, vocabulary: int):
    """Over peaked and flat rows, both dtypes, and every mix of truncations."""
    random = torch.Generator().manual_seed(vocabulary)
    rows = 16 if vocabulary > 10_000 else 100
    for scale in (0.05, 1.0, 6.0):
        for dtype in (torch.float32, torch.bfloat16):
            logits = (torch.randn(rows, vocabulary, generator=random) * scale).to(dtype)
            logits[::5, ::2] = -math.inf
            uniform = torch.rand(4, rows, generator=random, dtype=torch.float64)
            columns = {
                "temperature": uniform[0] * 2 * (torch.arange(rows) % 7 > 0),
                "top_k": torch.randint(0, 60, (rows,), generator=random)
                * (torch.arange(rows) % 3 > 0),
                "top_p": torch.where(torch.arange(rows) % 4 > 0, uniform[1], 1.0),
                "min_p": uniform[2] * 0.3 * (torch.arange(rows) % 5 > 1),
                "seed": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random),
                "position": torch.randint(0, 10**6, (rows,), generator=random),
            }
            right = draw(reference.sample_rows, logits, **columns)
            assert torch.equal(draw(library.sample_rows, logits, **columns), right)
            assert bool((right >= 0).all()) or vocabulary == 1


@cache
def many_draws() -> tuple[Tensor, Tensor]:
    """Rows, and what the reference draws from them."""
    logits = torch.randn(1200, 5000, generator=torch.Generator().manual_seed(3))
    return logits, draw(reference.sample_rows, logits, seed=torch.arange(1200))


def test_no_candidate_is_missed(library: Library):
    """The quick bound on a key must hold at its tightest, which takes many rows to meet."""
    logits, right = many_draws()
    assert torch.equal(draw(library.sample_rows, logits, seed=torch.arange(1200)), right)


def test_a_mass_that_is_just_reached_inside_a_bin(library: Library):
    """Two levels so close that a histogram does not part them, and top_p the exact share of one."""
    logits = torch.tensor([[0.0, -1.0 / 256, -1.0 / 256]])
    exact = 0
    for i in range(50):
        temperature = 1 + i / 64
        mass = ((logits.double() / temperature).exp() * 2.0**40).round()
        top_p = float(mass[0, 0] / mass.sum())
        exact += top_p * float(mass.sum()) == float(mass[0, 0])
        columns = {"temperature": temperature, "top_p": top_p, "position": torch.arange(64)}
        rows = logits.expand(64, -1)
        right = draw(reference.sample_rows, rows, **columns)
        assert torch.equal(draw(library.sample_rows, rows, **columns), right)
    assert exact > 10


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * len(ids)
    assert expected.min() >= 5
    return float(((ids.bincount(minlength=len(expected)) - expected) ** 2 / expected).sum())


# The 1 - 1e-6 quantiles of chi-square, by degrees of freedom.
LIMIT = {7: 40.5, 15: 56.5, 63: 134.0}


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_law_is_softmax(library: Library, vary: str, temperature: float):
    """Over consecutive seeds and over consecutive positions."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 0.5, 2.0, -0.3, 1.1]).repeat(2)
    rows = logits.expand(60_000, -1)
    ids = draw(
        library.sample_rows, rows, temperature=temperature, **{vary: torch.arange(len(rows))}
    )
    law = (logits.double() / temperature).softmax(0)
    assert chi_square(ids, law) < LIMIT[15]


def test_draws_of_neighbouring_positions_are_independent(library: Library):
    logits = torch.tensor([0.0, 1.0, -0.5, 0.5, 0.2, -1.0, 0.7, 0.1])
    rows = logits.expand(80_000, -1)
    ids = draw(library.sample_rows, rows, seed=7, position=torch.arange(len(rows)))
    law = logits.double().softmax(0)
    pairs = ids[0::2] * 8 + ids[1::2]
    assert chi_square(pairs, torch.outer(law, law).flatten()) < LIMIT[63]


def test_truncation_leaves_the_law_of_the_survivors(library: Library):
    logits = torch.linspace(3, -3, 40)
    ids = draw(library.sample_rows, logits.expand(40_000, -1), top_k=8, seed=torch.arange(40_000))
    assert chi_square(ids, logits[:8].double().softmax(0)) < LIMIT[7]


def test_greedy_is_the_lowest_maximum(sampler: Sampler):
    logits = torch.full((3, 200), -2.0)
    logits[0, [70, 150]] = 5.0
    logits[1, 199] = 0.0
    logits[2, [3, 4]] = torch.tensor([-0.0, 0.0])
    assert draw(sampler, logits, temperature=0.0).tolist() == [70, 199, 3]
    assert draw(sampler, logits.bfloat16(), temperature=0.0).tolist() == [70, 199, 3]


def test_top_k_keeps_k_and_ties(sampler: Sampler):
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 2.0])
    assert support(sampler, logits, top_k=1) == {1}
    assert support(sampler, logits, top_k=2) == {1, 2, 3, 5}
    assert support(sampler, logits, top_k=4) == {1, 2, 3, 5}
    assert support(sampler, logits, top_k=5) == {0, 1, 2, 3, 5}
    assert support(sampler, logits, top_k=6) == support(sampler, logits, top_k=0) == set(range(6))


def test_top_p_keeps_the_shortest_prefix_and_ties(sampler: Sampler):
    logits = torch.tensor([0.1, 0.5, 0.2, 0.2]).log()
    assert support(sampler, logits, top_p=1e-9) == {1}
    assert support(sampler, logits, top_p=0.49) == {1}
    assert support(sampler, logits, top_p=0.51) == {1, 2, 3}
    assert support(sampler, logits, top_p=0.91) == {0, 1, 2, 3}


def test_top_p_reached_exactly_ends_the_prefix(sampler: Sampler):
    """Masses are whole numbers: a half is a half, however it was summed."""
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, -40.0])
    assert support(sampler, logits, top_p=1 - 1e-12) == {0, 1, 2, 3}
    logits = torch.tensor([math.log(2), 0.0, 0.0])
    assert support(sampler, logits, top_p=0.5 - 1e-7) == {0}


def test_top_p_is_of_what_top_k_left(sampler: Sampler):
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert support(sampler, logits, top_p=0.55) == {0, 1}
    assert support(sampler, logits, top_k=2, top_p=0.55) == {0}


def test_min_p_is_relative_to_the_maximum(sampler: Sampler):
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    assert support(sampler, logits, min_p=0.61) == {0}
    assert support(sampler, logits, min_p=0.59) == {0, 1}
    assert support(sampler, logits, min_p=0.19) == {0, 1, 2, 3}
    assert support(sampler, logits, min_p=1.0) == {0}


def test_temperature_comes_before_truncation(sampler: Sampler):
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert support(sampler, logits, temperature=0.2, top_p=0.9) == {0}
    assert support(sampler, logits, temperature=5.0, top_p=0.9) == {0, 1, 2}


def test_minus_infinity_is_never_drawn(sampler: Sampler):
    logits = torch.full((100,), -math.inf)
    logits[[13, 77]] = torch.tensor([-5.0, -5.5])
    assert support(sampler, logits) == {13, 77}
    assert support(sampler, logits, top_k=50) == {13, 77}
    assert support(sampler, logits, temperature=1e9, top_p=0.999) == {13, 77}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_cannot_be_sampled_is_minus_one(sampler: Sampler, temperature: float):
    logits = torch.zeros(6, 130)
    logits[1, 129] = math.nan
    logits[2, 0] = -math.nan
    logits[3] = -math.inf
    logits[4, 5] = math.inf
    ids = draw(sampler, logits, temperature=temperature).tolist()
    assert ids[1:5] == [-1] * 4
    assert ids[0] == ids[5] >= 0


def test_extreme_temperatures(sampler: Sampler):
    logits = torch.tensor([1.0, 1.0000001, -3e38, 0.0])
    assert support(sampler, logits, temperature=1e-300) == {1}
    assert support(sampler, logits, temperature=1e-3) == {0, 1}
    assert support(sampler, logits, temperature=1e-320, top_p=0.5) == {1}
    assert support(sampler, torch.tensor([3e38, -3e38]), temperature=1e300) == {0, 1}
    assert support(sampler, torch.tensor([3e38, -3e38]), temperature=1e300, top_p=0.9) == {0, 1}
    assert support(sampler, torch.tensor([3e38, 2e38, -3e38]), temperature=1e38) == {0, 1}


def test_a_row_is_a_function_of_itself(sampler: Sampler):
    """Greedy and sampled rows mixed; any subset in any order draws the same."""
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 300, generator=random)
    columns = {
        "temperature": torch.tensor([0.0, 0.7, 1.3]).repeat(8),
        "top_p": torch.tensor([1.0, 0.9]).repeat(12),
        "top_k": torch.tensor([0, 0, 5, 40]).repeat(6),
        "seed": torch.arange(24),
        "position": torch.arange(24) * 11,
    }
    together = draw(sampler, logits, **columns)
    order = torch.randperm(24, generator=random)
    shuffled = draw(sampler, logits[order], **{k: v[order] for k, v in columns.items()})
    assert torch.equal(shuffled, together[order])
    for row in range(24):
        alone = draw(sampler, logits[row : row + 1], **{k: v[row] for k, v in columns.items()})
        assert alone == together[row]


def test_rows_may_lie_apart(library: Library):
    wide = torch.randn(5, 128)
    apart = draw(library.sample_rows, wide[:, :100])
    assert torch.equal(apart, draw(library.sample_rows, wide[:, :100].contiguous()))


def test_the_noise_is_version_1():
    """Pinned values: another generator is another SAMPLER_VERSION."""
    assert reference.SAMPLER_VERSION == 1
    assert reference.mix(torch.tensor(1)) == 0x5692161D100B05E5
    seed, position, ids = torch.tensor(1234567), torch.tensor(89), torch.tensor([0, 1, 49151])
    noise = reference.gumbel(seed, position, ids)
    pinned = [1.5171998481173758, 1.8489048485420108, -0.38221246259419966]
    torch.testing.assert_close(noise, torch.tensor(pinned, dtype=torch.float64))


def test_the_generator_is_splitmix64():
    """From state 0 it gives the published first outputs."""
    states = torch.arange(1, 4) * (reference.GAMMA - 2**64)
    first = [z % 2**64 for z in reference.mix(states).tolist()]
    assert first == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_wrong_inputs_are_refused(library: Library):
    with pytest.raises(ValueError, match="float16"):
        draw(library.sample_rows, torch.zeros(1, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="contiguous"):
        draw(library.sample_rows, torch.zeros(4, 4).T)
    ones = torch.ones(2)
    with pytest.raises(ValueError, match="one value per row"):
        library.sample_rows(torch.zeros(1, 4), ones, ones, ones, ones, ones, ones)
