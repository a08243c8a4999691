"""Paged attention for several query rows per sequence, in Triton; `reference.paged_attention`.

One program takes a few query tokens of one sequence and all heads of one KV head, as the rows of a
matrix, and walks the sequence's KV once in tiles of `TILE` absolute positions:

    S = Q K^T scale,  m' = max(m, rowmax S),  P = exp(S - m')
    l = l exp(m - m') + rowsum P,  acc = acc exp(m - m') + P V,  out = acc / l

(the online softmax of Milakov and Gimelshein, 2018, as in FlashAttention). Tiles begin at multiples
of TILE, and one of which a row sees nothing leaves its state as it was, so a row does not depend on
which rows share its program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAGE = tl.constexpr(16)
TILE = 64
ROWS = 16  # the least that a matrix unit takes


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    out,
    block_tables,
    cu_query,
    context_lens,
    tile_sequence,
    tile_start,
    q_row,
    q_head,
    out_row,
    out_head,
    table_row,
    scale,
    window,
    kv_heads,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tile_sequence + tile)
    start = tl.load(cu_query + sequence)
    count = tl.load(cu_query + sequence + 1) - start
    first = (tile - tl.load(tile_start + sequence)) * TOKENS
    if first < count:
        context = tl.load(context_lens + sequence)
        row = tl.arange(0, ROWS)
        token = first + row // GROUP
        head = kv_head * GROUP + row % GROUP
        real = (row < TOKENS * GROUP) & (token < count)
        position = context - count + token
        dim = tl.arange(0, DIM_PADDED)
        at_row = (start + token).to(tl.int64)
        queries = tl.load(
            q + at_row[:, None] * q_row + head[:, None] * q_head + dim[None, :],
            mask=real[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)

        end = tl.minimum(context - count + first + TOKENS, context)
        begin = 0
        if window > 0:
            begin = tl.maximum(context - count + first + 1 - window, 0) // TILE * TILE
        for base in range(begin, end, TILE):
            at = base + tl.arange(0, TILE)
            written = at < end
            page = tl.load(
                block_tables + sequence * table_row + at // PAGE, mask=written, other=0
            ).to(tl.int64)
            head_page = (page * kv_heads + kv_head) * DIM * PAGE
            inside = written[None, :] & (dim < DIM)[:, None]
            pair = (dim // 2 * (PAGE * 2) + dim % 2)[:, None] + (at % PAGE * 2)[None, :]
            keys = tl.load(k_cache + head_page[None, :] + pair, mask=inside, other=0.0)
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale

            sees = at[None, :] <= position[:, None]
            if window > 0:
                sees = sees & (at[None, :] > position[:, None] - window)
            scores = tl.where(sees, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # has seen nothing yet
            weights = tl.exp(scores - finite[:, None])
            old_part = tl.exp(top - finite)
            total = total * old_part + tl.sum(weights, 1)
            pair = (at % PAGE // 2 * (2 * DIM) + at % 2)[:, None] + (dim * 2)[None, :]
            values = tl.load(
                v_cache + head_page[:, None] + pair,
                mask=written[:, None] & (dim < DIM)[None, :],
                other=0.0,
            )
            acc = acc * old_part[:, None] + tl.dot(
                weights.to(values.dtype), values, input_precision=PRECISION
            )
            top = new_top

        tl.store(
            out + at_row[:, None] * out_row + head[:, None] * out_head + dim[None, :],
            acc / tl.where(total == 0.0, 1.0, total)[:, None],  # zero in unused rows alone
            mask=real[:, None] & (dim < DIM)[None, :],
        )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    cu_query: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
) -> None:
    """`reference.paged_attention` without int8 KV, and V of the rows of this step must be finite.

    A matrix unit multiplies what a row does not see by a weight of zero, so a NaN in a sequence's
    newest positions reaches its earlier rows of the same step (and no other sequence). Nothing is
    read back to the host: the grid is the most tiles there can be, and surplus ones do nothing.
    """
    rows, heads, dim = q.shape
    kv_heads = v_cache.shape[1]
    group = heads // kv_heads
    tokens = max(1, ROWS // group)
    sequences = len(context_lens)
    grid = rows // tokens + sequences
    tiles = (cu_query.diff() + tokens - 1) // tokens
    starts = torch.nn.functional.pad(tiles.cumsum(0), (1, 0)).int()
    numbers = torch.arange(grid, dtype=torch.int32, device=q.device)
    owner = torch.searchsorted(starts, numbers, right=True).sub_(1).clamp_(max=sequences - 1).int()
    _attend[(grid, kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        cu_query,
        context_lens,
        owner,
        starts,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        scale,
        window,
        kv_heads,
        TOKENS=tokens,
        GROUP=group,
        ROWS=triton.next_power_of_2(max(ROWS, tokens * group)),
        DIM=dim,
        DIM_PADDED=max(16, triton.next_power_of_2(dim)),
        TILE=TILE,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
    )
