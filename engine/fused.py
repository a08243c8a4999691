"""Models of the common families (Llama and SmolLM2, Mistral, Qwen2, Qwen3) as one call a pass.

The weights of a loaded transformers model are packed for `kernels`, once; its modules are not used
afterwards. What differs between the families is read off the modules: biases, norms of heads,
windows. `selfcheck` compares the result with the stock model before anything is served.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.kv_cache import KVCache
from engine.model_input import ModelInput
from engine.quantised import Weights
from kernels.cpu.decoder import Decoder, DecoderLayer, DecoderWeights, LayerPool
from kernels.cpu.dense import DEPTH, WIDTH, PackedWeight, Weight
from kernels.cpu.library import Library
from kernels.cpu.quantised import QuantisedWeight
from kernels.gguf_blocks import take_apart
from kernels.hugepages import zeros

FAMILIES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
# Angles that depend on the position alone. The others change with the length of the text, so that
# a row would depend on what comes after it.
ROTARY = frozenset({"default", "linear", "llama3", "yarn"})


def fusable(model: Any) -> bool:
    """Whether `fuse` knows this model: family, activation, angles and sizes."""
    config = model.config
    if type(model).__name__ not in FAMILIES or model.dtype not in (torch.bfloat16, torch.float32):
        return False
    attention = model.model.layers[0].self_attn
    head_dim = attention.head_dim
    depths = (config.hidden_size, config.num_attention_heads * head_dim, config.intermediate_size)
    return (
        config.hidden_act == "silu"
        and model.model.rotary_emb.rope_type in ROTARY
        and all(depth % DEPTH == 0 for depth in depths)
        and head_dim % WIDTH == 0
        and head_dim <= 256
    )


class FusedNetwork:
    """`Network` by `kernels.cpu.decoder`."""

    def __init__(self, library: Library, weights: DecoderWeights, cache: KVCache) -> None:
        pools = [
            LayerPool(k, v, *cache.scales(i))
            for i, (k, v) in enumerate(zip(cache.k, cache.v, strict=True))
        ]
        self.embedding = weights.embedding
        self._decoder = Decoder(library, weights, pools, torch.get_num_threads())

    def logits(self, batch: ModelInput) -> Tensor:
        """(R, vocabulary) float32, valid until the next call."""
        return self._decoder.logits(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.block_tables,
            batch.cu_query,
            batch.context_lens,
            batch.logit_rows,
        )

    def hidden(self, rows: int) -> Tensor:
        """See `engine.runner.OpenNetwork`."""
        return self._decoder.hidden(rows)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `engine.runner.OpenNetwork`."""
        return self._decoder.embed(token_ids)


def fuse(model: Any, context: int, quantised: Weights | None = None) -> DecoderWeights:
    """Pack the weights of a `fusable` model for positions up to `context`: its own, or those that
    are given, which have the same values.

    Its own are let go, one by one, so that they need not be in memory twice.
    """
    inner, attention = model.model, model.model.layers[0].self_attn
    head_dim = attention.head_dim
    embedding, tied = inner.embed_tokens.weight, model.lm_head.weight is inner.embed_tokens.weight
    own = None if tied else zeros(embedding.shape, embedding.dtype).copy_(embedding.detach())
    cos, sin = _angles(inner.rotary_emb, context, head_dim)
    pack: _Packer = _Dense() if quantised is None else _Quantised(model, quantised)
    weights = DecoderWeights(
        layers=tuple(
            _layer(pack, layer, _window(layer.self_attn, model.config)) for layer in inner.layers
        ),
        norm=_floats(inner.norm.weight),
        head=pack.join(model.lm_head),
        embedding=own,
        cos=cos,
        sin=sin,
        heads=model.config.num_attention_heads,
        kv_heads=model.config.num_key_value_heads,
        head_dim=head_dim,
        eps=inner.norm.variance_epsilon,
        scale=attention.scaling,
    )
    for parameter in model.parameters():  # a single one would keep the whole file in memory
        parameter.data = parameter.new_empty(0)
    return weights


def _layer(pack: _Packer, layer: Any, window: int) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        qkv=pack.join(attention.q_proj, attention.k_proj, attention.v_proj),
        out=pack.join(attention.o_proj),
        gate_up=pack.alternate(mlp.gate_proj, mlp.up_proj),
        down=pack.join(mlp.down_proj),
        attention_norm=_floats(layer.input_layernorm.weight),
        mlp_norm=_floats(layer.post_attention_layernorm.weight),
        q_norm=_floats(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
        k_norm=_floats(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
        window=window,
    )


def _window(attention: Any, config: Any) -> int:
    """Qwen says it per layer, Mistral for all; Llama has none, whatever its config says."""
    known = config if config.model_type == "mistral" else attention
    return getattr(known, "sliding_window", None) or 0


class _Packer(Protocol):
    """Makes one weight of several layers."""

    def join(self, *linears: nn.Linear) -> Weight:
        """Their columns one after the other."""
        ...

    def alternate(self, *linears: nn.Linear) -> Weight:
        """A block of the columns of each in turn."""
        ...


class _Dense:
    """Of the layers' own weights."""

    def join(self, *linears: nn.Linear) -> Weight:
        return PackedWeight.pack(torch.cat([_take(linear) for linear in linears]), _biases(linears))

    def alternate(self, *linears: nn.Linear) -> Weight:
        return PackedWeight.pack(_alternate([_take(x) for x in linears]), _turns(linears))


class _Quantised:
    """Of what `weights` have by the names that the layers' have in `model`."""

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        # Of a tied weight the first name.
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._weights = weights

    def join(self, *linears: nn.Linear) -> Weight:
        return QuantisedWeight.join(self._pack(linears), _biases(linears))

    def alternate(self, *linears: nn.Linear) -> Weight:
        return QuantisedWeight.alternate(self._pack(linears), _turns(linears))

    def _pack(self, linears: Seq[nn.Linear]) -> list[QuantisedWeight]:
        found = (self._weights[self._names[id(linear.weight)]] for linear in linears)
        return [QuantisedWeight.pack(take_apart(q.format, q.raw)) for q in found]


def _take(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight.detach()  # type: ignore[operator]
    layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return weight


def _alternate(tensors: Seq[Tensor]) -> Tensor:
    blocks = (t.reshape(len(t) // WIDTH, WIDTH, *t.shape[1:]) for t in tensors)
    return torch.stack(tuple(blocks), 1).flatten(0, 2)


def _turns(linears: Seq[nn.Linear]) -> Tensor | None:
    """Biases in turn, as the blocks of `alternate`."""
    biases = [layer.bias for layer in linears if layer.bias is not None]
    return _alternate([bias.detach() for bias in biases]) if biases else None


def _biases(linears: Seq[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in linears):
        return None
    biases = (
        torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in linears
    )
    return torch.cat([bias.float() for bias in biases])


def _floats(tensor: Tensor) -> Tensor:
    return tensor.detach().float().clone()


def _angles(rotary: Any, context: int, head_dim: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        both = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(context)[None])
    cos, sin = (t[0, :, : head_dim // 2].clone().contiguous() for t in both)
    return cos, sin
