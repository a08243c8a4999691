"""From feeds to tensors: the only place with slot arithmetic."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.types import Feed


@dataclass(frozen=True, slots=True)
class Draws:
    """What the sampler needs per sampled row. See `kernels.reference.sample_rows`."""

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
    the rows whose logits are needed; `sampled` int64, which of these are drawn from (None: all);
    `draws` how.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    cu_query: Tensor
    context_lens: Tensor
    logit_rows: Tensor
    sampled: Tensor | None
    draws: Draws

    @staticmethod
    def build(feeds: Seq[Feed], block_size: int, device: torch.device) -> ModelInput:
        """`feeds` must not be empty, nor any of them."""
        lens = np.array([len(f.tokens) for f in feeds])
        starts = np.array([f.start for f in feeds])
        sampled = np.array([f.sample for f in feeds])
        known = np.array([len(f.known) for f in feeds])
        tables = _tables(feeds)
        ends = lens.cumsum()
        rows = np.arange(ends[-1])
        owner = np.repeat(np.arange(len(feeds)), lens)
        by_row = np.empty((3, len(rows)), np.int64)
        token_ids, positions, slots = by_row
        token_ids[:] = [token for f in feeds for token in f.tokens]
        np.add(rows, (starts + lens - ends)[owner], out=positions)
        np.add(tables[owner, positions // block_size] * block_size, positions % block_size, slots)
        drawn = logit_rows = np.flatnonzero(rows >= (ends - sampled)[owner])
        among = None
        if known.any():
            logit_rows = np.flatnonzero(rows >= (ends - sampled - known)[owner])
            among = torch.from_numpy(np.searchsorted(logit_rows, drawn)).to(device)
        by_sequence = np.zeros((2, len(feeds) + 1), np.int32)
        by_sequence[0, 1:] = ends
        by_sequence[1, 1:] = starts + lens
        ids, at, into = _on(device, by_row)
        cu_query, context_lens = _on(device, by_sequence)
        return ModelInput(
            ids,
            at,
            into,
            torch.from_numpy(tables).to(device),
            cu_query,
            context_lens[1:],
            torch.from_numpy(logit_rows).to(device),
            among,
            _draws(feeds, sampled, positions[drawn] + 1, device),
        )


def _on(device: torch.device, rows: NDArray[np.generic]) -> tuple[Tensor, ...]:
    """Each row of a matrix as a tensor; together they are one copy."""
    return torch.from_numpy(rows).to(device).unbind()


def _tables(feeds: Seq[Feed]) -> NDArray[np.int32]:
    widest = max(len(f.blocks) for f in feeds)
    padding = [0] * widest
    flat = array("i")
    for feed in feeds:
        flat.fromlist([*feed.blocks, *padding[len(feed.blocks) :]])
    return np.frombuffer(flat, np.int32).reshape(len(feeds), widest)


def _draws(
    feeds: Seq[Feed], counts: NDArray[np.int64], positions: NDArray[np.int64], device: torch.device
) -> Draws:
    params = [f.sampling for f in feeds]
    reals = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    temperature, top_p, min_p = _on(device, np.repeat(np.array(reals), counts, axis=1))
    whole = np.empty((3, len(positions)), np.int64)
    whole[0] = np.repeat([p.top_k for p in params], counts)
    whole[1].view(np.uint64)[:] = np.repeat(np.array([p.seed for p in params], np.uint64), counts)
    whole[2] = positions
    top_k, seeds, after = _on(device, whole)
    return Draws(temperature, top_k, top_p, min_p, seeds, after)
