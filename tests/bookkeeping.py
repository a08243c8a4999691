"""What a step costs beside the model's pass: `python -m tests.bookkeeping`.

A step of 32 sequences of about 300 tokens must read 270 MB of weights and 220 MB of KV (SmolLM2 in
bf16); at 20 to 32 GB/s that takes 15 to 25 ms. All that is not the pass has to stay small beside
it: here the pass is replaced by a look at the text that is to come out, and the rest is timed:
plan, n-gram drafts, building the batch, verifying, detokenizing, reporting, and packing the
message to the other process. Drafts are as good as lookup in source code is.

Prints a table in microseconds and, as its last line, one JSON object. Timings are medians over
steps in which nothing begins or ends. `waiting` is how much longer a step takes with so many
requests waiting; `prefix` how much longer with the prefix cache where nothing is found, by steps
taken in turns with and without.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.core import Engine
from engine.draft_choice import DraftChoice
from engine.draft_guard import GuardedDraft
from engine.draft_ngram import NgramDraft
from engine.host import LastReport
from engine.messages import Stepped
from engine.model_input import ModelInput
from engine.policy import ClassArrival
from engine.prefix import NoPrefixCache, PrefixCache
from engine.request import Request, SamplingParams, StopParams
from engine.scheduler import Scheduler
from engine.step_costs import FREE, StepCosts
from engine.text import Detokenizer, StopStrings
from engine.types import Drawn, Feed

ROOT = Path(__file__).parent.parent
TOKENIZER = Path.home() / ".cache/draftwire/models/smollm2-135m/tokenizer.json"
SEQUENCES = 32
PROMPT = 240
OUTPUT = 512
BLOCK = 16
CPU = torch.device("cpu")


class Recited:
    """A model that says what the text of a request says next, whatever it is fed."""

    def __init__(self, texts: Seq[Seq[int]]) -> None:
        self._texts = {text[0]: text for text in texts}

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        batch = ModelInput.build(feeds, BLOCK, CPU)
        assert len(batch.logit_rows) == sum(feed.sample for feed in feeds)
        return [self._next(feed) for feed in feeds]

    def _next(self, feed: Feed) -> Drawn:
        # The seed says which text it is: a real model would know by what it has read.
        text = self._texts[feed.sampling.seed]
        end = feed.start + len(feed.tokens)
        return Drawn(tuple(text[end - feed.sample + 1 : end + 1]))


class Bench:
    """An engine as in `engine.build`, but for the model, that decodes SEQUENCES texts."""

    def __init__(
        self, corpus: Seq[int], tokenizer: Tokenizer, *, drafts: bool, cache: bool, waiting: int = 0
    ) -> None:
        config = EngineConfig(max_seqs=SEQUENCES, draft_rows=256 if drafts else 0)
        length = PROMPT + OUTPUT + 8
        # A text begins with its number, so that no two begin alike.
        texts = [[i, *corpus[i * 97 : i * 97 + length]] for i in range(SEQUENCES)]
        pool = BlockPool(SEQUENCES * -(-length // BLOCK) + 64, BLOCK)
        prefixes = PrefixCache(pool, b"key") if cache else NoPrefixCache()
        self.scheduler = Scheduler(
            config,
            pool,
            prefixes,
            ClassArrival(),
            lambda request: Detokenizer(
                tokenizer, request.prompt, StopStrings(request.stopping.strings)
            ),
            8192,
        )
        ngram = GuardedDraft(NgramDraft(), 49152)
        self.reports = LastReport()
        self.engine = Engine(
            self.scheduler,
            Recited(texts),
            DraftChoice([ngram] if drafts else [], costs=StepCosts(FREE)),
            lambda pairs: None,
            time.perf_counter,
            self.reports,
        )
        for i, text in enumerate(texts):
            self.submit(str(i), text[: PROMPT + i], i)
        while any(s.generated < 2 for s in self.scheduler.running) or not self.scheduler.running:
            self.engine.step()
        for i in range(waiting):
            self.submit(f"waiting{i}", [i, *corpus[:PROMPT]], i)
        self.fed = self.emitted = 0

    def submit(self, name: str, prompt: Seq[int], seed: int) -> None:
        stopping = StopParams(OUTPUT, eos_ids=frozenset({0}), strings=("\nclass Never",))
        sampling = SamplingParams(temperature=0.0, seed=seed)
        deadline = time.perf_counter() + 3600
        request = Request(name, tuple(prompt), stopping, sampling, deadline=deadline)
        self.engine.submit(request)

    def step(self) -> dict[str, float]:
        """Seconds of one step, by phase."""
        start = time.perf_counter()
        ended = self.engine.collect()
        chunks = self.engine.step()
        stepped = time.perf_counter()
        report = self.reports.take()
        ForkingPickler.dumps(Stepped(tuple(ended + chunks), report))
        done = time.perf_counter()
        assert report is not None
        assert report.sequences == SEQUENCES
        self.fed += report.rows
        self.emitted += report.emitted
        phases = dict(report.phases)
        other = stepped - start - sum(phases.values())
        return {**phases, "other": other, "pack": done - stepped, "step": done - start}


def medians(steps: Iterable[dict[str, float]]) -> dict[str, float]:
    """Microseconds by phase."""
    taken = list(steps)
    return {name: round(1e6 * median(s[name] for s in taken), 1) for name in taken[0]}


def in_turns(one: Bench, other: Bench, steps: int) -> tuple[float, float]:
    """Median microseconds of a step of each, taken alternately."""
    pairs = [(one.step()["step"], other.step()["step"]) for _ in range(steps)]
    return 1e6 * median(a for a, _ in pairs), 1e6 * median(b for _, b in pairs)


def measure(make: Callable[..., Bench], steps: int) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, drafts in (("plain", False), ("ngram", True)):
        bench = make(drafts=drafts, cache=True)
        phases = medians(bench.step() for _ in range(steps))
        result[name] = {
            **phases,
            "rows": round(bench.fed / steps, 1),
            "tokens": round(bench.emitted / steps, 1),
        }
    for name, more in (("waiting", {"waiting": 10_000}), ("prefix", {"cache": True})):
        with_it, without = in_turns(
            make(**{"drafts": False, "cache": name == "waiting", **more}),
            make(drafts=False, cache=name == "waiting"),
            steps,
        )
        result[name] = {"us": round(with_it, 1), "more_us": round(with_it - without, 1)}
    return result


def corpus_of(tokenizer: Tokenizer) -> list[int]:
    text = "\n".join(p.read_text() for p in sorted((ROOT / "engine").glob("*.py")))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="tokenizer.json")
    parser.add_argument("--steps", type=int, default=100, help="at most what the outputs last")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    corpus = corpus_of(tokenizer)

    def make(*, drafts: bool, cache: bool, waiting: int = 0) -> Bench:
        return Bench(corpus, tokenizer, drafts=drafts, cache=cache, waiting=waiting)

    result = measure(make, arguments.steps)
    for name, row in result.items():
        print(f"{name:10}", *(f"{k} {v}" for k, v in row.items()), sep="  ")  # type: ignore[attr-defined]
    print(json.dumps({"benchmark": "bookkeeping", "sequences": SEQUENCES, **result}))


if __name__ == "__main__":
    main()
