"""The full run over real schemas with a real model; what it checks is in `tests.schemas`."""

from __future__ import annotations

import json

import pytest

from tests.schemas.__main__ import main


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["schemas"] == 200
    assert line["ends"]["EOS"] > line["outputs"] / 2
    assert min(accepted for accepted, _ in line["drafts"].values()) > 100
