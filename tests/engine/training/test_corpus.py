"""What was written is read back, whatever ended the run that wrote it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.training.corpus import DOCUMENTS, FEATURES, TOKENS, Corpus, Document

HIDDEN = 8


def states(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fill(directory: Path) -> Corpus:
    """Three documents of 3, 1 and 5 rows."""
    corpus = Corpus(directory, HIDDEN)
    corpus.add([5, 6, 7], states(3, 1), 2, 0.0, False, 0)
    corpus.add([8], states(1, 2), 1, 1.0, True, 4)
    corpus.add([1, 2, 3, 4, 5], states(5, 3), 2, 0.5, False, 2)
    return corpus


def features_of(corpus: Corpus) -> Tensor:
    return torch.from_numpy(corpus.features().copy()).view(torch.bfloat16)


def test_round_trip(tmp_path: Path) -> None:
    fill(tmp_path)
    again = Corpus(tmp_path, HIDDEN)
    assert again.rows == 9
    assert again.documents == [
        Document(0, 3, 2, 0.0, False, 0),
        Document(3, 1, 1, 1.0, True, 4),
        Document(4, 5, 2, 0.5, False, 2),
    ]
    assert again.tokens().tolist() == [5, 6, 7, 8, 1, 2, 3, 4, 5]
    assert torch.equal(features_of(again), torch.cat((states(3, 1), states(1, 2), states(5, 3))))


def test_all_bits_are_kept(tmp_path: Path) -> None:
    """Of every bfloat16 there is: infinities, denormals, both zeros."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    rows = bits.view(torch.bfloat16).view(-1, HIDDEN)
    corpus = Corpus(tmp_path, HIDDEN)
    corpus.add([0] * len(rows), rows, 1, 0.0, False)
    assert np.array_equal(corpus.features(), bits.view(-1, HIDDEN).numpy())


def test_it_is_mapped_not_read(tmp_path: Path) -> None:
    corpus = fill(tmp_path)
    assert isinstance(corpus.features(), np.memmap)
    assert isinstance(corpus.tokens(), np.memmap)


def test_of_another_width_nothing_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 tokens with features"):
        Corpus(tmp_path, HIDDEN).add([1, 2], torch.zeros(2, HIDDEN + 1), 1, 0.0, False)
    assert Corpus(tmp_path, HIDDEN).documents == []


@given(st.sampled_from([TOKENS, FEATURES, DOCUMENTS]), st.integers(0, 400))
def test_torn_anywhere(tmp_path_factory: pytest.TempPathFactory, name: str, size: int) -> None:
    """A file that ends too soon: the documents that are whole are kept, and it is gone on with."""
    directory = tmp_path_factory.mktemp("corpus")
    whole = fill(directory)
    tokens, features = whole.tokens().tolist(), features_of(whole)
    with (directory / name).open("r+b") as file:
        file.truncate(min(size, (directory / name).stat().st_size))
    again = Corpus(directory, HIDDEN)
    kept = len(again.documents)
    assert again.documents == whole.documents[:kept]
    assert again.tokens().tolist() == tokens[: again.rows]
    again.add([9, 9], states(2, 4), 1, 0.0, False)
    last = Corpus(directory, HIDDEN)
    assert len(last.documents) == kept + 1
    assert last.tokens().tolist() == [*tokens[: again.rows - 2], 9, 9]
    assert torch.equal(features_of(last), torch.cat((features[: again.rows - 2], states(2, 4))))


def test_rows_without_their_line(tmp_path: Path) -> None:
    fill(tmp_path)
    for name in (TOKENS, FEATURES):
        with (tmp_path / name).open("ab") as file:
            file.write(b"x" * 21)
    with (tmp_path / DOCUMENTS).open("a") as file:
        file.write('{"start": 9, "length": 4')
    again = Corpus(tmp_path, HIDDEN)
    assert (len(again.documents), again.rows) == (3, 9)
    assert (tmp_path / TOKENS).stat().st_size == 36
    assert (tmp_path / FEATURES).stat().st_size == 9 * 2 * HIDDEN
    assert (tmp_path / DOCUMENTS).read_text().endswith("}\n")
