"""The microbenchmarks run as they are documented; what they say is for people to read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernels import bench


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [([], set(bench.PARTS)), (["all"], set(bench.PARTS)), (["sampling"], {"sampling"})],
)
def test_parts(
    arguments: list[str],
    parts: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def note(*unused: Any) -> list[dict[str, object]]:
        return []

    for part in ("linears", "attention", "sampling"):
        monkeypatch.setattr(bench, f"report_{part}", note)
    bench.main([*arguments, "--threads", "2"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert parts <= found.keys()
    assert not (set(bench.PARTS) - parts) & found.keys()
