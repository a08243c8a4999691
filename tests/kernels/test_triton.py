"""The Triton kernel under Triton's interpreter, in a process of its own.

The interpreter must be chosen before Triton is imported, and stays for the life of the process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the extra `gpu`")
def test_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        cwd=CASES.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
