"""What a target has written, with its hidden states: kept on the disk, read in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TOKENS, FEATURES, DOCUMENTS = "tokens.i32", "features.bf16", "documents.jsonl"


@dataclass(frozen=True, slots=True)
class Document:
    """Rows [start, start + length) of the corpus, the first `prompt` of which are not the target's.
    `held_out`: for evaluation only. `number` is that of the prompt in its data, if it is known."""

    start: int
    length: int
    prompt: int
    temperature: float
    held_out: bool = False
    number: int = -1


class Corpus:
    """`tokens` int32 and `features` bfloat16 (rows, hidden) of all documents, one after another.

    A document counts once its line is written, which is after its rows: what a killed run leaves
    behind is cut off by the next.
    """

    def __init__(self, directory: Path, hidden: int) -> None:
        self._directory = directory
        self._hidden = hidden
        directory.mkdir(parents=True, exist_ok=True)
        sizes = ((TOKENS, 4), (FEATURES, 2 * hidden))
        there = min(_size(directory / name) // size for name, size in sizes)
        self.documents, kept = _whole(directory / DOCUMENTS, there)
        self.rows = sum(d.length for d in self.documents)
        for name, length in ((DOCUMENTS, kept), *((n, self.rows * s) for n, s in sizes)):
            with (directory / name).open("ab") as file:
                file.truncate(length)

    def add(
        self,
        tokens: Seq[int],
        features: Tensor,
        prompt: int,
        temperature: float,
        held_out: bool,
        number: int = -1,
    ) -> None:
        """`features` (len(tokens), hidden)."""
        document = Document(self.rows, len(tokens), prompt, temperature, held_out, number)
        if features.shape != (len(tokens), self._hidden):
            raise ValueError(f"{len(tokens)} tokens with features {tuple(features.shape)}")
        with (self._directory / TOKENS).open("ab") as file:
            file.write(np.array(tokens, np.int32).tobytes())
        with (self._directory / FEATURES).open("ab") as file:
            file.write(features.bfloat16().view(torch.int16).numpy().tobytes())
        with (self._directory / DOCUMENTS).open("a") as file:
            file.write(json.dumps(asdict(document)) + "\n")
        self.documents.append(document)
        self.rows += document.length

    def tokens(self) -> NDArray[np.int32]:
        """All, mapped."""
        if not self.rows:
            return np.zeros(0, np.int32)
        return np.memmap(self._directory / TOKENS, np.int32, "r", shape=(self.rows,))

    def features(self) -> NDArray[np.int16]:
        """All (rows, hidden), mapped; the bits of bfloat16."""
        if not self.rows:
            return np.zeros((0, self._hidden), np.int16)
        shape = (self.rows, self._hidden)
        return np.memmap(self._directory / FEATURES, np.int16, "r", shape=shape)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _whole(path: Path, rows: int) -> tuple[list[Document], int]:
    """Documents whose line and whose rows are all there, up to the first that is not; the length of
    their lines in bytes."""
    documents: list[Document] = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    kept = end = 0
    for line in lines:
        document = Document(**json.loads(line))
        end += document.length
        if end > rows:
            break
        documents.append(document)
        kept += len(line) + 1
    return documents, kept
