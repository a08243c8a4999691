"""What the operations mean, in torch: the oracle, and the path where no compiler is.

Attention here is right but not strict: torch's matmul may give a row other bits in other company.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 16
"""Positions per KV block."""

SAMPLER_VERSION = 1
"""Version of the rule in `sample_rows`; part of the fingerprint that replays depend on."""

GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASS_ONE = float(1 << 40)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store row t of `k` and `v` (T, kv_heads, D) at `slots[t]`; rows with slot -1 are skipped.

    Slots are int32 or int64 and distinct. Caches as in the package docstring, of the rows' dtype,
    or int8 with two scales, as `quantise` says.
    """
    used = slots >= 0
    slots = slots[used].long()
    block, offset = slots // BLOCK, slots % BLOCK
    k, v = k[used], v[used]
    if k_scale is not None and v_scale is not None:
        k, k_scale[block, :, offset] = quantise(k)
        v, v_scale[block, :, offset] = quantise(v)
    rows, heads, dim = k.shape
    k_cache[block, :, :, offset] = k.reshape(rows, heads, dim // 2, 2)
    v_cache[block, :, offset // 2, :, offset % 2] = v


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(..., D) -> int8 of the same shape, and float32 scales (...); what int8 KV holds.

    scale = largest magnitude / 127, and an element is x / scale rounded to the nearest whole
    number, even on a tie, all in float32. A scale below the normal numbers counts as 0, and so do
    the elements; a row that holds a NaN or an infinity has scale NaN, so that it is seen to be bad.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)  # NaN if there is any
    scale = largest / 127
    scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0.0)
    scale = scale.masked_fill(~largest.isfinite(), torch.nan)
    good = (scale > 0)[..., None]
    whole = torch.where(good, (wide / scale[..., None]).round(), 0.0)
    return whole.to(torch.int8), scale


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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Causal attention of packed query rows over paged KV, written to `out`.

    q, out (T, heads, D), of the caches' dtype, or of any if these are int8 with scales. Sequence s
    owns rows `cu_query[s]` to `cu_query[s + 1]` and the blocks `block_tables[s]` (S, max_blocks)
    int32. `context_lens[s]` counts its KV positions including these rows, which must have been
    written: the last row sits at position `context_lens[s] - 1`, the ones before it just before. A
    row sees the positions up to
    its own and, if `window` > 0, only the last `window` of them; what lies elsewhere in the pages
    may be anything, NaN too. heads is a multiple of kv_heads. Accumulates in float32.
    """
    starts = cu_query.tolist()
    group = q.shape[1] // v_cache.shape[1]
    for s, context in enumerate(context_lens.tolist()):
        first, last = starts[s], starts[s + 1]
        if first == last:
            continue
        table = block_tables[s, : -(-context // BLOCK)].long()
        keys, values = _gather(k_cache, v_cache, table, context)
        if k_scale is not None and v_scale is not None:
            keys *= _gather_scales(k_scale, table, context)
            values *= _gather_scales(v_scale, table, context)
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        positions = torch.arange(context, device=q.device)
        rows = positions[context - (last - first) :, None]
        hidden = positions > rows
        if window > 0:
            hidden |= positions <= rows - window
        scores = torch.einsum("thd,lhd->htl", q[first:last].float(), keys) * scale
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[first:last] = torch.einsum("htl,lhd->thd", weights, values).to(out.dtype)


def _gather(k_cache: Tensor, v_cache: Tensor, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """K and V of one sequence as float32 (context, kv_heads, D)."""
    _, heads, half, _, _ = k_cache.shape
    keys = k_cache[table].permute(0, 3, 1, 2, 4).reshape(-1, heads, half * 2)
    values = v_cache[table].permute(0, 2, 4, 1, 3).reshape(-1, heads, half * 2)
    return keys[:context].float(), values[:context].float()


def _gather_scales(scales: Tensor, table: Tensor, context: int) -> Tensor:
    """(context, kv_heads, 1)"""
    return scales[table].transpose(1, 2).reshape(-1, scales.shape[1], 1)[:context]


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token id per row of `logits` (R, V), float32 or bf16; -> (R,) int64. A pure function.

    The other arguments are (R,): temperature, top_p and min_p floats; top_k (0: all), seeds (the 64
    bits of an unsigned seed) and positions (absolute, of the token drawn) int64. No row depends on
    another. A row with a NaN in it or without a finite maximum gives -1; -inf is never chosen.

    The rule, version `SAMPLER_VERSION`, in double. Temperature 0: the maximum. Else

    1. x = (logit - maximum) / temperature.
    2. top-k keeps the logits not below the k-th largest.
    3. top-p (under 1) keeps the shortest prefix of these in descending order whose mass reaches
       top_p of their total, and all ties of its last. A mass is exp(x) in whole units of 2^-40, so
       that sums do not depend on their order.
    4. min-p keeps x >= log(min_p).
    5. The token is the survivor with the largest x + g, g = -log(-log(u)) (Gumbel-max), where
       u = (the top 52 bits of mix(mix(mix(seed) + position) + (id + 1) * GAMMA) + 1/2) / 2^52,
       mix is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) and u is inside (0, 1).

    The lowest id wins a tie, in the maximum and in the draw.
    """
    x = survivors(logits, temperature, top_k, top_p, min_p)
    keys = x + gumbel(seeds[:, None], positions[:, None], torch.arange(x.shape[1]).to(x.device))
    ids: Tensor = keys.argmax(1)
    return torch.where(x.isnan().any(1), -1, ids)


def survivors(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """x of each token that steps 1 to 4 of `sample_rows` keep, -inf of the others; (R, V) double.

    At temperature 0 the lowest of the maxima is kept. A row that nothing can be drawn from is NaN.
    """
    rows = logits.double()
    best = rows.amax(1, keepdim=True)  # NaN if there is any
    x = (rows - best) / torch.where(temperature > 0, temperature, 1.0)[:, None]
    keep = rows > -math.inf
    if bool((top_k > 0).any() or (top_p < 1).any()):
        keep &= rows >= _edges(rows, x, top_k, top_p)
    keep &= x >= min_p.log().clamp(max=0.0)[:, None]
    greedy = torch.zeros_like(keep).scatter_(1, rows.argmax(1, keepdim=True), True)
    keep = torch.where(temperature[:, None] > 0, keep, greedy)
    return torch.where(best.isfinite(), x.masked_fill(~keep, -math.inf), math.nan)


def _edges(rows: Tensor, x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit of each row that top-k and top-p keep; (R, 1)."""
    logits, order = rows.sort(descending=True)
    some = (top_k > 0) & (top_k < rows.shape[1])
    edge = logits.gather(1, torch.where(some, top_k - 1, 0)[:, None])
    edge = torch.where(some[:, None], edge, -math.inf)
    mass = (x.gather(1, order).exp() * _MASS_ONE).round().masked_fill(logits < edge, 0.0)
    mass = mass.long().cumsum(1)
    reached = mass.double() >= top_p[:, None] * mass[:, -1:].double()
    nucleus = logits.gather(1, reached.byte().argmax(1, keepdim=True))
    return torch.where(top_p[:, None] < 1, nucleus, edge)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The noise of the draw of `ids`, double."""
    return -(-uniform(seeds, positions, ids).log()).log()


def uniform(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """u of step 5 of `sample_rows`, double; the arguments are int64 and broadcast."""
    bits = mix(mix(mix(seeds) + positions) + (ids + 1) * _signed(GAMMA))
    return (_shift(bits, 12).double() + 0.5) / float(1 << 52)


def mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 that hold unsigned values: products wrap, shifts must
    not extend the sign."""
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    return z >> bits & (1 << 64 - bits) - 1


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z
