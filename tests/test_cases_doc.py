"""`docs/cases.md` names tests; they must be there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
DOC = TESTS.parent / "docs" / "cases.md"


def test_every_case_is_named_once_and_every_test_exists() -> None:
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("| B")]
    cases = [row.split("|")[1].strip() for row in rows]
    assert len(cases) == len(set(cases)) > 0
    for row in rows:
        named = re.findall(r"`(\S+\.py)::(\w+)`", row)
        assert named or "issue" in row, row
        for path, function in named:
            assert f"def {function}(" in (TESTS / path).read_text(), f"{path}::{function}"
