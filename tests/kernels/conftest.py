"""Every test of the C++ kernels runs for each instruction set of this machine."""

from __future__ import annotations

from functools import cache

import pytest

from kernels import build, reference
from kernels.cpu.library import Library, load
from kernels.ops import WriteKV

NAMES = ("amx_emulated", "generic", "avx2", "avx512", "avx512bf16", "amx")


@cache
def libraries() -> dict[str, Library]:
    """By instruction set; empty where there is neither a library nor a compiler."""
    if not build.LIBRARY.exists():
        try:
            build.find_compiler()
        except build.BuildError:
            return {}
        pytest.fail("the kernels are not built: python -m kernels.build")
    found = {}
    for name in NAMES:
        try:
            library = load(name)
        except ValueError:
            continue
        assert library is not None
        found[name] = library
    return found


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest) -> Library:
    """The library for one instruction set."""
    if request.param not in libraries():
        pytest.skip(f"no {request.param} here")
    return libraries()[request.param]


@pytest.fixture(params=["reference", NAMES[0]])
def write_kv(request: pytest.FixtureRequest) -> WriteKV:
    """One instruction set is enough: this op does not depend on it."""
    if request.param == "reference":
        return reference.write_kv
    if request.param not in libraries():
        pytest.skip("not built")
    return libraries()[request.param].write_kv
