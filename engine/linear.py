"""Linear layers with weights packed once for the library's GEMM (bf16 on the CPU)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """y = x W^T + b with W reordered for oneDNN, which is what `nn.Linear` does on every call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def pack_linears(model: nn.Module) -> int:
    """Replace every bf16 `nn.Linear` of a CPU model. Returns how many were replaced."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child.weight.dtype == torch.bfloat16
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)
