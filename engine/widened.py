"""A model of bf16 weights that computes in float32, without being in memory as float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Each module has its parameters in float32 while it computes, and no other has."""
    turn = _Turn()
    hooks = [hook for module in model.modules() for hook in turn.take_part(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Turn:
    """The module that computes, and what its parameters hold meanwhile."""

    def __init__(self) -> None:
        self._narrow: list[tuple[nn.Parameter, Tensor]] = []

    def take_part(self, module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        if isinstance(module, nn.Embedding):  # few of its rows are asked for
            return [module.register_forward_hook(lambda _, __, rows: rows.float())]
        if not any(True for _ in module.parameters(recurse=False)):
            return []
        return [
            module.register_forward_pre_hook(self._widen),
            module.register_forward_hook(self._restore, always_call=True),
        ]

    def _widen(self, module: nn.Module, _: object) -> None:
        for parameter in module.parameters(recurse=False):
            self._narrow.append((parameter, parameter.data))
            parameter.data = parameter.data.float()

    def _restore(self, *_: object) -> None:
        while self._narrow:
            parameter, data = self._narrow.pop()
            parameter.data = data
