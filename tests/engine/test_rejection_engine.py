"""A whole engine that verifies by rejection: the law is the target's, and nothing is lost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.request import LogitParams, Request, SamplingParams, StopParams
from tests.engine.test_runner import TinyRig, wanted
from tests.engine.tiny import prompts

FAMILY = "llama"
SERVED = 3200


def totals(rig: TinyRig) -> tuple[int, int]:
    reports = rig.observer.reports
    return sum(r.drafted for r in reports), sum(r.accepted for r in reports)


@pytest.mark.parametrize("drafts", ["none", "ngram", "model", "perfect", "ngram,model", "junk"])
def test_greedy_is_what_it_always_is(drafts: str) -> None:
    rig = TinyRig(FAMILY, drafts, rejection=True)
    assert rig.generate([p for p, _ in wanted(FAMILY)], 40) == TinyRig(FAMILY, "none").generate(
        [p for p, _ in wanted(FAMILY)], 40
    )


def test_the_target_as_its_own_draft_is_always_accepted() -> None:
    rig = TinyRig(FAMILY, "perfect", rejection=True)
    rig.generate(prompts(8, random.Random(2)), 40, SamplingParams(0.9, top_k=30, seed=5))
    drafted, accepted = totals(rig)
    assert drafted > 100
    # A last draft may lie past the end of the output.
    assert accepted >= drafted - 8 * 4


@pytest.mark.parametrize("drafts", ["ngram", "model", "junk,model"])
def test_every_generation_ends_with_what_it_asked_for(drafts: str) -> None:
    rig = TinyRig(FAMILY, drafts, rejection=True, num_blocks=24, prefix_cache=False)
    for tokens in (1, 2, 7, 33):
        outputs = rig.generate(
            prompts(12, random.Random(tokens)), tokens, SamplingParams(1.1, top_p=0.95, seed=3)
        )
        assert [len(ids) for ids in outputs] == [tokens] * 12


def frequencies(rig: TinyRig, first_seed: int) -> list[Counter[tuple[int, ...]]]:
    """Of the first one, two and three tokens, biased and cut off."""
    prompt = tuple(prompts(1, random.Random(4))[0])
    sampling = SamplingParams(0.7, top_k=6, top_p=0.8, logits=LogitParams(bias=((17, 3.0),)))
    found: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(3)]
    for first in range(first_seed, first_seed + SERVED, 32):
        requests = [
            Request(str(i), prompt, StopParams(3), replace(sampling, seed=first + i))
            for i in range(32)
        ]
        for ids in rig.serve(requests):
            for position in range(3):
                found[position][tuple(ids[: position + 1])] += 1
    return found


def test_a_draft_far_from_the_target_under_bias_and_truncation() -> None:
    """With drafts and without; what is cut off never comes."""
    rigs = [
        TinyRig(
            FAMILY, drafts, rejection=True, num_blocks=256, max_seqs=32, rows=200, prefix_cache=True
        )
        for drafts in ("model", "none")
    ]
    both = [frequencies(rig, seed) for rig, seed in zip(rigs, (0, 10**6), strict=True)]
    drafted, accepted = totals(rigs[0])
    assert 0 < accepted < drafted / 2  # far from the target
    for own, other in zip(*both, strict=True):
        apart = sum(abs(own[k] - other[k]) for k in {*own, *other}) / 2 / SERVED
        # Two samples of one law of so many outcomes differ by about sqrt(outcomes / (pi N)).
        assert apart < 2 * (len({*own, *other}) / (3.14 * SERVED)) ** 0.5
        assert not {k for k in own if k not in other and own[k] > 8}


def test_strictness_is_not_promised_with_it() -> None:
    with pytest.raises(ConfigError, match="numerics strict promises what"):
        EngineConfig(verification="rejection", numerics="strict")
    with pytest.raises(ConfigError, match="unknown verification 'both'"):
        EngineConfig(verification="both")
