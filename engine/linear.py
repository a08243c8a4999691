"""Linear layers of stock modules on the CPU, weights packed once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.cpu.dense import PackedWeight, linear
from kernels.cpu.library import Library


class StrictLinear(nn.Module):
    """By our own kernels: a row of the result is the same in any company."""

    def __init__(self, layer: nn.Linear, library: Library) -> None:
        super().__init__()
        bias = None if layer.bias is None else layer.bias.detach()
        self.weight = PackedWeight.pack(layer.weight.detach(), bias)
        self._library = library

    def forward(self, x: Tensor) -> Tensor:
        return linear(self._library, x, self.weight, torch.get_num_threads())


class LibraryLinear(nn.Module):
    """By oneDNN, for bf16: y = x W^T + b with W reordered, which `nn.Linear` does on every call."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def replace_linears(model: nn.Module, replacement: Callable[[nn.Linear], nn.Module]) -> None:
    """Put `replacement(layer)` in the place of every `nn.Linear` of a model."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    for parent, name, child in found:
        setattr(parent, name, replacement(child))
