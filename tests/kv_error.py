"""What int8 KV does to a model's logits: `python -m tests.kv_error`.

Feeds each prompt in chunks of 256 over KV of the model's own type and over int8 KV, and compares
the logits of every position: the relative error of their norm, and where the most likely token is
another. In float32 nothing else differs. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.model_input import ModelInput
from engine.pooled import load_models
from engine.request import SamplingParams
from engine.types import Feed

CHUNK = 256


def logits(config: EngineConfig, prompts: list[str], most: int) -> list[Tensor]:
    """(T, V) float32 for the first `most` tokens of each prompt."""
    target = load_models(config, time.monotonic).target
    found = []
    for prompt in prompts:
        ids = tuple(target.loaded.tokenizer.encode(prompt, add_special_tokens=False).ids[:most])
        blocks = list(range(-(-len(ids) // config.block_size)))
        rows = []
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            feed = Feed(part, start, blocks, len(part), SamplingParams(0.0))
            with torch.inference_mode():
                batch = ModelInput.build([feed], config.block_size, torch.device("cpu"))
                rows.append(target.paged.logits(batch).float().clone())
        found.append(torch.cat(rows))
    return found


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.kv_error", description=__doc__)
    parser.add_argument("model", help="a converted model's directory")
    parser.add_argument("prompts", type=Path, nargs="+", help="text files")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args(arguments)
    prompts = [p.read_text() for p in options.prompts]
    own, int8 = (
        logits(
            EngineConfig(model=options.model, draft="none", dtype=options.dtype, kv_dtype=kv),
            prompts,
            options.tokens,
        )
        for kv in ("auto", "int8")
    )
    errors = [((b - a).norm() / a.norm()).item() for a, b in zip(own, int8, strict=True)]
    same = torch.cat([a.argmax(1) == b.argmax(1) for a, b in zip(own, int8, strict=True)])
    print(
        json.dumps(
            {
                "dtype": options.dtype,
                "positions": len(same),
                "relative_error": [round(e, 5) for e in errors],
                "same_argmax": round(same.float().mean().item(), 4),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
