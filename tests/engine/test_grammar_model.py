"""Structured output of a real model: it matches, and drafts do not change a byte."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.build import assemble
from engine.config import EngineConfig
from engine.drafting import draft_choice
from engine.outcome import FinishReason
from engine.pooled import Models, load_models
from engine.request import GrammarParams, Request, SamplingParams, StopParams
from engine.training.evaluate import costless
from tests.engine.fakes import RecordingObserver

MODEL = Path.home() / ".cache/draftwire/models/smollm2-135m"
EOS = 2
PLACE = {
    "type": "object",
    "properties": {
        "city_name": {"type": "string", "maxLength": 12},
        "population_in_thousands": {"type": "integer", "minimum": 0, "maximum": 99999},
        "is_capital": {"type": "boolean"},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
    },
    "required": ["city_name", "population_in_thousands", "is_capital", "continent"],
    "additionalProperties": False,
}

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not MODEL.is_dir(), reason="SmolLM2 is not in the cache"),
]


def place(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == PLACE["required"]
        and len(value["city_name"]) <= 12
        and 0 <= value["population_in_thousands"] <= 99999
        and value["is_capital"] in (True, False)
        and value["continent"] in ("Africa", "America", "Asia", "Europe", "Oceania")
    )


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


DATE = r"The date is [0-9]{4}-[0-9]{2}-[0-9]{2} in Prague\."
CASES: list[tuple[str, GrammarParams, Callable[[str], bool]]] = [
    ("Describe a city as JSON: ", GrammarParams("json_schema", json.dumps(PLACE)), place),
    ("When? ", GrammarParams("regex", DATE), matches(DATE)),
    ("def", GrammarParams("regex", r" [a-z_]{1,20}\(\):\n"), matches(r" [a-z_]{1,20}\(\):\n")),
    (
        "Is water wet? ",
        GrammarParams("lark", 'start: "yes" | "yes, of course it is" | "no"'),
        ("yes", "yes, of course it is", "no").__contains__,
    ),
    ("Smile! ", GrammarParams("regex", "(😀|🎉|ž){2,5}", longest=True), matches("(😀|🎉|ž){5}")),
]
SAMPLINGS = (SamplingParams(0.0), SamplingParams(1.0, seed=7), SamplingParams(1.3, 0, 0.95, seed=8))


@pytest.fixture(scope="module")
def models() -> Models:
    return costless(load_models(EngineConfig(str(MODEL), kv_cache_mib=128), time.monotonic))


def serve(models: Models, drafts: str, drafted: int, alone: bool) -> list[tuple[str, list[int]]]:
    """Reason and ids of each case with each sampling."""
    config = EngineConfig(
        str(MODEL), draft=drafts, max_draft_tokens=drafted, draft_rows=200, kv_cache_mib=128
    )
    observer = RecordingObserver()
    draft = draft_choice(config, models, time.monotonic)
    built = assemble(config, models, draft, time.monotonic, observer)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    stopping = StopParams(64, eos_ids=frozenset({EOS}))
    requests = [
        Request(str(i), tuple(tokenizer.encode(prompt).ids), stopping, sampling, grammar=grammar)
        for i, (sampling, (prompt, grammar, _)) in enumerate(
            (s, case) for s in SAMPLINGS for case in CASES
        )
    ]
    ids: list[list[int]] = [[] for _ in requests]
    reasons = ["" for _ in requests]
    for group in [[r] for r in requests] if alone else [requests]:
        for request in group:
            built.engine.submit(request)
        while built.engine.busy:
            for chunk in built.engine.step():
                ids[int(chunk.request_id)].extend(chunk.tokens)
                if chunk.finish is not None:
                    reasons[int(chunk.request_id)] = str(chunk.finish.reason)
    if drafted and drafts != "none":
        assert sum(r.accepted for r in observer.reports) > 50
    return list(zip(reasons, ids, strict=True))


@pytest.fixture(scope="module")
def plainly(models: Models) -> list[tuple[str, list[int]]]:
    return serve(models, "none", 0, alone=True)


def test_what_is_complete_matches(plainly: list[tuple[str, list[int]]]) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for i, (reason, ids) in enumerate(plainly):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert reason == FinishReason.EOS, text
        assert ids[-1] == EOS
        assert CASES[i % len(CASES)][2](text), text


@pytest.mark.parametrize("drafted", range(1, 9))
def test_drafts_change_nothing(
    models: Models, plainly: list[tuple[str, list[int]]], drafted: int
) -> None:
    assert serve(models, "ngram", drafted, alone=False) == plainly
