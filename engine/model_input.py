"""From feeds to tensors: the only place with slot arithmetic."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.types import Feed


@dataclass(frozen=True, slots=True)
class Draws:
    """What the sampler needs per sampled row; R rows. See `kernels.reference.sample_rows`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One ragged batch of T rows from S sequences.

    `token_ids`, `positions` int64 (T); `slots` int64 (T), where each row's K/V goes;
    `block_tables` int32 (S, most blocks), zero padded; `cu_query` int32 (S + 1), offsets of the
    sequences' rows; `context_lens` int32 (S), KV length with these rows; `logit_rows` int64 (R),
    the rows to sample; `draws` how.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    cu_query: Tensor
    context_lens: Tensor
    logit_rows: Tensor
    draws: Draws

    @staticmethod
    def build(feeds: Seq[Feed], block_size: int, device: torch.device) -> ModelInput:
        """`feeds` must not be empty, nor any of them."""
        lens = np.array([len(f.tokens) for f in feeds])
        starts = np.array([f.start for f in feeds])
        widest = max(len(f.blocks) for f in feeds)
        tables = np.zeros((len(feeds), widest), np.int32)
        for row, feed in zip(tables, feeds, strict=True):
            row[: len(feed.blocks)] = feed.blocks
        cu_query = np.concatenate(([0], np.cumsum(lens)))
        owner = np.repeat(np.arange(len(feeds)), lens)
        positions = np.arange(cu_query[-1]) - (cu_query[:-1] - starts)[owner]
        slots = tables[owner, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        sampled = np.array([f.sample for f in feeds])
        logit_rows = _last_rows(cu_query[1:], sampled)

        def tensor(values: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        return ModelInput(
            tensor(np.concatenate([f.tokens for f in feeds]), torch.int64),
            tensor(positions, torch.int64),
            tensor(slots, torch.int64),
            tensor(tables, torch.int32),
            tensor(cu_query, torch.int32),
            tensor(starts + lens, torch.int32),
            tensor(logit_rows, torch.int64),
            _draws(feeds, sampled, positions[logit_rows] + 1, device),
        )


def _last_rows(ends: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each sequence the indices of its last `counts` rows, in order."""
    owner = np.repeat(np.arange(len(ends)), counts)
    firsts = np.concatenate(([0], np.cumsum(counts)))[:-1]
    rows: NDArray[np.int64] = ends[owner] - counts[owner] + np.arange(len(owner)) - firsts[owner]
    return rows


def _draws(
    feeds: Seq[Feed], counts: NDArray[np.int64], positions: NDArray[np.int64], device: torch.device
) -> Draws:
    params = [f.sampling for f in feeds]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        repeated = np.repeat(np.array(values), counts)
        return torch.from_numpy(repeated).to(device, dtype)

    seeds = np.array([p.seed for p in params], np.uint64).view(np.int64)
    return Draws(
        column([p.temperature for p in params], torch.float64),
        column([p.top_k for p in params], torch.int64),
        column([p.top_p for p in params], torch.float64),
        column([p.min_p for p in params], torch.float64),
        torch.from_numpy(np.repeat(seeds, counts)).to(device),
        torch.from_numpy(positions).to(device),
    )
