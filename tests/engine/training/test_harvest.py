"""What is kept of a text is what the target computes of it, bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build import assemble
from engine.config import EngineConfig
from engine.draft import DraftWrapper
from engine.draft_ngram import NgramDraft
from engine.drafting import draft_choice
from engine.pooled import Models, load_models
from engine.request import Request, SamplingParams, StopParams
from engine.training.corpus import Corpus
from engine.training.harvest import HELD_OUT, Listener, harvest
from engine.types import Feed, Proposal, StepPlan
from tests.engine.fakes import RecordingObserver
from tests.engine.training.models import IDS, write_target

TOKENS, AT_ONCE = 40, 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = write_target(tmp_path_factory.mktemp("target"))
    return load_models(config_of(directory), time.monotonic, read=True)


def config_of(directory: Path, kv_mib: int = 4) -> EngineConfig:
    return EngineConfig(
        str(directory), prefix_cache=False, threads=1, kv_cache_mib=kv_mib, max_seqs=AT_ONCE
    )


def requests(count: int, tokens: int = TOKENS) -> Iterator[Request]:
    rng = random.Random(3)
    for number in range(count):
        prompt = tuple(rng.randrange(3, IDS) for _ in range(rng.randint(1, 40)))
        sampling = SamplingParams(float(number % 2), seed=number)
        yield Request(str(number), prompt, StopParams(tokens), sampling)


class Wrong(DraftWrapper):
    """Drafts for everyone, nearly always wrong."""

    def propose(self, plan: StepPlan) -> list[Proposal]:
        tokens = (7, 8, 9)
        return [Proposal(tokens[: w.draft_cap] if w.samples else (), "ngram") for w in plan.work]


class Drafting(DraftWrapper):
    """n-gram drafts wherever there are any, whether they pay or not."""

    accepted = 0

    def observe(self, plan: StepPlan, proposals: Any, verdicts: Any) -> None:
        super().observe(plan, proposals, verdicts)
        self.accepted += sum(v.accepted for v in verdicts)


class Harvest:
    def __init__(self, models: Models, directory: Path, blocks: int, source: Any) -> None:
        config = config_of(Path(models.target.loaded.directory))
        choice = draft_choice(config, models, time.monotonic)
        assert models.target.features is not None
        self.listener = Listener(source, models.target.features, config.block_size)
        self.observer = RecordingObserver()
        self.built = assemble(
            config, models, choice, time.monotonic, self.observer, listener=self.listener
        )
        self.corpus = Corpus(directory, models.target.loaded.config.hidden_size)
        pool = self.built.engine.scheduler.pool
        if blocks:  # the others are taken by someone else
            assert pool.grow(pool.table(), (pool.num_blocks - blocks) * config.block_size)

    def run(self, source: Iterator[Request], enough: Callable[[], bool] = lambda: False) -> int:
        return sum(harvest(self.built.engine, self.listener, source, AT_ONCE, self.corpus, enough))


def check(models: Models, corpus: Corpus) -> None:
    """Each document is fed to the target at once."""
    paged, features = models.target.paged, models.target.features
    assert features is not None
    kept = torch.from_numpy(corpus.features().copy()).view(torch.bfloat16)
    for document in corpus.documents:
        rows = slice(document.start, document.start + document.length)
        tokens = tuple(corpus.tokens()[rows].tolist())
        assert torch.equal(kept[rows], states_of(paged, features, tokens))


def states_of(paged: Any, features: Any, tokens: tuple[int, ...]) -> Tensor:
    blocks = list(range(len(tokens) // 16 + 1))
    paged.run([Feed(tokens, 0, blocks, 1, SamplingParams(0.0))])
    found: Tensor = features.rows[: len(tokens)].clone()
    return found


def outputs_of(models: Models, requests: list[Request]) -> dict[int, list[int]]:
    """Prompt and output, by number, without drafts."""
    config = config_of(Path(models.target.loaded.directory))
    choice = draft_choice(config, models, time.monotonic)
    engine = assemble(config, models, choice, time.monotonic).engine
    texts = {int(r.id): list(r.prompt) for r in requests}
    for request in requests:
        engine.submit(request)
    while engine.busy:
        for chunk in engine.step():
            texts[int(chunk.request_id)].extend(chunk.tokens)
    return texts


@pytest.mark.parametrize("source", ["ngram", "wrong"])
@pytest.mark.parametrize("blocks", [0, 16])
def test_all_but_the_last_token_with_its_states(
    models: Models, tmp_path: Path, blocks: int, source: str
) -> None:
    """Drafts that are accepted, and that are not; with enough blocks, and with so few that
    sequences lose theirs."""
    draft = Drafting(NgramDraft() if source == "ngram" else Wrong(NgramDraft()))
    run = Harvest(models, tmp_path, blocks, draft)
    asked = list(requests(14))
    assert run.run(iter(asked)) == 14 * TOKENS
    assert bool(sum(r.preempted for r in run.observer.reports)) == bool(blocks)
    assert draft.accepted > 20 or source == "wrong"
    corpus = run.corpus
    assert sorted(d.number for d in corpus.documents) == list(range(14))
    expected = outputs_of(models, asked)
    for document in corpus.documents:
        tokens = corpus.tokens()[document.start : document.start + document.length]
        whole = expected[document.number]
        # The last token was not fed, unless it was a draft that was right.
        assert tokens.tolist() == whole[: document.length]
        assert document.length >= len(whole) - 1
        assert document.prompt == len(asked[document.number].prompt)
        assert document.temperature == document.number % 2
    check(models, corpus)
    assert not run.listener._heard


def test_cut_off_in_the_middle(models: Models, tmp_path: Path) -> None:
    """What they have got to is kept; the engine is empty afterwards, and nothing is remembered."""
    run = Harvest(models, tmp_path, 0, NgramDraft())
    steps = iter(range(100))
    asked = list(requests(14))
    run.run(iter(asked), lambda: next(steps) > 24)
    documents = run.corpus.documents
    lengths = [d.length - d.prompt for d in documents]
    assert 0 < min(lengths) < TOKENS - 1
    check(models, run.corpus)
    expected = outputs_of(models, asked)
    for d in documents:
        tokens = run.corpus.tokens()[d.start : d.start + d.length].tolist()
        assert tokens == expected[d.number][: d.length]
    assert not run.listener._heard
    assert not run.built.engine.busy
    again = Corpus(tmp_path, models.target.loaded.config.hidden_size)
    assert again.documents == documents


def test_one_that_cannot_be_served_leaves_nothing(models: Models, tmp_path: Path) -> None:
    run = Harvest(models, tmp_path, 0, NgramDraft())
    bad = Request("0", (5,) * 600, StopParams(TOKENS), SamplingParams(0.0))
    good = Request("1", (5, 6, 7), StopParams(20), SamplingParams(0.0))
    run.run(iter([bad, good]))
    assert [d.number for d in run.corpus.documents] == [1]


def test_of_forty_prompts_a_greedy_and_a_drawn_one_are_held_out(
    models: Models, tmp_path: Path
) -> None:
    run = Harvest(models, tmp_path, 0, NgramDraft())
    run.run(requests(2 * HELD_OUT, tokens=2))
    held = [d for d in run.corpus.documents if d.held_out]
    assert sorted(d.temperature for d in held) == [0.0, 1.0]
