"""Quantised weights of a model by the names of its parameters: its GGUF file's, or made here.

A model of them has the values, and gives the bits, of the same model with its weights widened to
bfloat16. Which is what `save` and `quantise` see to: what a GGUF file's become is compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.checkpoint import ORIGIN, read_json
from engine.errors import ConfigError, ModelError
from kernels.gguf_blocks import FORMATS

NATIVE = "native.safetensors"  # in a ready directory: blocks as in the GGUF file that it is made of
MADE = {"q4": "Q4_1", "q8": "Q8_0"}
EMBEDDING = "model.embed_tokens.weight"
NAMES = {
    "token_embd": EMBEDDING,
    "output": "lm_head.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
}
IN_A_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight in blocks of a GGUF format: uint8 (rows, bytes of a row)."""

    format: str
    raw: Tensor

    def widened(self) -> Tensor:
        """(rows, depth) bfloat16."""
        values = gguf.quants.dequantize(self.raw.numpy(), GGMLQuantizationType[self.format])
        return torch.from_numpy(values).bfloat16()


class Weights(Protocol):
    """Those of a model, by the names of its parameters."""

    def __getitem__(self, name: str) -> Quantised: ...


def save_native(
    source: Path, weights: Mapping[str, Tensor], heads: tuple[int, int], out: Path
) -> str:
    """Write what `source` holds of `weights`, a model's parameters made of it, to `out`.

    `heads` of queries and of keys. Returns why nothing was written, if so.
    """
    found: dict[str, Quantised] = {}
    for tensor in GGUFReader(source).tensors:
        name, kind = _name(tensor.name), tensor.tensor_type.name
        if name not in weights:
            continue
        if kind not in FORMATS:
            return f"{tensor.name} is {kind}"
        # Without a copy it would be a view of the file.
        quantised = Quantised(kind, torch.from_numpy(np.array(tensor.data)))
        ordered = _as_in_model(quantised, weights[name], heads)
        if ordered is None:
            return f"{tensor.name} is not what became of it"
        found[name] = ordered
    if missing := needed(weights) - found.keys():
        return f"{min(missing)} is not in the file"
    formats = {name: q.format for name, q in found.items()}
    save_file(
        {name: q.raw for name, q in found.items()}, out, metadata={"formats": json.dumps(formats)}
    )
    return ""


def needed(names: Mapping[str, Any]) -> set[str]:
    """The parameters that linear layers and the embedding have."""
    ends = tuple(NAMES.values())
    return {name for name in names if name.endswith(ends)}


def weights_as(kind: str, model: nn.Module, directory: Path) -> Weights | None:
    """What `--weights` asks for; None for the model's own. It has the values of what is returned.

    Raises ConfigError, or ModelError where there is no such thing.
    """
    if kind == "auto":
        return None
    if model.dtype != torch.bfloat16:
        raise ConfigError(f"weights {kind} need dtype bfloat16")
    return native(directory) if kind == "native" else quantise(model, kind)


def kind_of_draft(kind: str, directory: Path) -> str:
    """A draft that is of no quantised file is no reason to refuse a target that is."""
    return "auto" if kind == "native" and not (directory / NATIVE).is_file() else kind


def native(directory: Path) -> Weights:
    """What `save_native` wrote. Raises ModelError if there is nothing."""
    path = directory / NATIVE
    if not path.is_file():
        why = read_json(directory, ORIGIN, optional=True).get("not_native")
        raise ModelError(
            f"{directory} has no {NATIVE}: {why or 'it was not made of a quantised GGUF file'}"
        )
    return _File(path)


def quantise(model: nn.Module, kind: str) -> Weights:
    """Give `model` the values that its linear weights and embedding have as `kind` of MADE."""
    number = GGMLQuantizationType[MADE[kind]]
    made: dict[str, Quantised] = {}
    parameters = dict(model.named_parameters())
    for name in needed(parameters):
        wide = parameters[name].detach().float().numpy()
        own = Quantised(MADE[kind], torch.from_numpy(gguf.quants.quantize(wide, number)))
        parameters[name].data = own.widened()
        made[name] = own
    return made


class _File:
    """`Weights` that are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self._formats: dict[str, str] = json.loads(self._file.metadata()["formats"])  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Quantised:
        return Quantised(self._formats[name], self._file.get_tensor(name))  # type: ignore[no-untyped-call]


def _name(name: str) -> str:
    """That of the parameter; empty if it is not known."""
    if match := IN_A_LAYER.fullmatch(name):
        own = NAMES.get(match[2])
        return f"model.layers.{match[1]}.{own}" if own else ""
    return NAMES.get(name.removesuffix(".weight"), "")


def _as_in_model(own: Quantised, weight: Tensor, heads: tuple[int, int]) -> Quantised | None:
    """With the rows in the order of `weight`; None if there is none."""
    values = own.widened()
    if torch.equal(values, weight):
        return own
    for order in _orders(len(weight), heads):
        if torch.equal(values[order], weight):
            return Quantised(own.format, own.raw[order].contiguous())
    return None


def _orders(rows: int, heads: tuple[int, int]) -> Iterator[Tensor]:
    """llama.cpp turns pairs of neighbours in a head, transformers the halves of it."""
    for count in heads:
        if rows % (2 * count) == 0:
            yield torch.arange(rows).view(count, -1, 2).transpose(1, 2).flatten()
