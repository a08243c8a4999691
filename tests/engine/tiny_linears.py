"""Linear layers for tests: one that is strict because it does everything one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RowByRow(nn.Module):
    """y = x W^T + b by one dot product per row and column: no row can know of another."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight.detach().float()
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        y = torch.stack([self.row(row) for row in rows]) if len(rows) else rows @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).reshape(*x.shape[:-1], -1)

    def row(self, row: Tensor) -> Tensor:
        return torch.mv(self.weight, row)


def replace_linears(model: nn.Module, kind: type[RowByRow] = RowByRow) -> int:
    """Put `kind` in the place of every linear layer. Returns how many there were."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    for parent, name, child in found:
        setattr(parent, name, kind(child))
    return len(found)


class SkipsATile(RowByRow):
    """The last 16 columns are computed for the first 32 rows only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.view(-1, y.shape[-1])[32:, -16:] = 0
        return y


class OneRowItsOwnWay(RowByRow):
    """A single row takes another order of K than one among others."""

    def forward(self, x: Tensor) -> Tensor:
        self.single = x.shape[:-1].numel() == 1
        return super().forward(x)

    def row(self, row: Tensor) -> Tensor:
        if not self.single:
            return super().row(row)
        return torch.mv(self.weight.flip(1), row.flip(0))


class SplitsK(RowByRow):
    """Where rows are many, the sum of two halves (as of two threads)."""

    def forward(self, x: Tensor) -> Tensor:
        self.many = x.shape[:-1].numel() > 4
        return super().forward(x)

    def row(self, row: Tensor) -> Tensor:
        if not self.many:
            return super().row(row)
        half = len(row) // 2
        first, second = self.weight[:, :half], self.weight[:, half:]
        return torch.mv(first, row[:half]) + torch.mv(second, row[half:])
