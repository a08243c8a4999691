"""`make fidelity` in small: every axis, in all number types, down to the bits of the logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from engine import network
from engine.request import StopParams
from tests.engine.tiny_fidelity import IN_PROCESS, SHARE, TinySuite, named, write_models
from tests.fidelity.restart import run_restart
from tests.fidelity.settings import SETTINGS, Setting

KINDS: dict[str, dict[str, object]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8-kv": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "stock-modules": {"dtype": "bfloat16"},
}
# Stock modules take ten times as long.
OF_STOCK = ("company", "chunks-16", "prefix-warm", "preempted")
CASES = [(k, s) for k in KINDS for s in IN_PROCESS if k != "stock-modules" or s.name in OF_STOCK]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest, directory: Path) -> TinySuite:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "stock-modules":
            patch.setattr(network, "fusable", lambda model: False)
        return TinySuite(directory, **KINDS[request.param])


@pytest.mark.parametrize(
    ("suite", "setting"), CASES, indirect=["suite"], ids=[f"{k}-{s.name}" for k, s in CASES]
)
def test_any_setting_gives_the_same(suite: TinySuite, setting: Setting) -> None:
    row = suite.run(setting)
    assert row.comparisons == SHARE
    assert [d.line() for d in row.differences] == []
    assert row.idle == []


@pytest.mark.timeout(300)
def test_a_process_that_is_killed_and_started_again(directory: Path) -> None:
    suite = TinySuite(directory, dtype="bfloat16")
    setting = named("restart")
    share = [
        replace(r, stopping=StopParams(120 if i % 2 else 8))
        for i, r in enumerate(suite.share(setting))
    ]
    requests = [replace(r, id=f"{r.id} longer") for r in share]
    suite.suite.references(requests)
    wants = {r.id: suite.suite.reference(r.id) for r in requests}
    row = run_restart(setting, suite.config, requests, wants)
    assert row.comparisons == SHARE
    assert [d.line() for d in row.differences] == []
    assert row.idle == []


def test_every_setting_and_every_axis_has_its_share() -> None:
    by_axis: Counter[str] = Counter()
    for setting in SETTINGS:
        by_axis.update(dict.fromkeys(setting.axes, setting.share))
    assert sum(s.share for s in SETTINGS) >= 1000
    kinds = [axis for axis in by_axis if not axis.startswith(("batch", "chunks"))]
    assert {axis: by_axis[axis] for axis in kinds if by_axis[axis] < 100} == {}
