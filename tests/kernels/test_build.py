"""Building the library: failing costs speed alone, and no instruction leaks between units."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build

ROOT = Path(__file__).parents[2]


def test_no_compiler_is_a_warning(monkeypatch, tmp_path, capsys):
    old = tmp_path / "_cpu.so"
    old.write_bytes(b"of older sources")
    monkeypatch.setattr(build, "LIBRARY", old)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert not build.build_or_warn()
    assert "no C++ compiler" in capsys.readouterr().err
    assert not old.exists()


def test_a_failing_compiler_is_a_warning_and_leaves_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "_cpu.so")
    monkeypatch.setattr(build.build, "__defaults__", (build.LIBRARY,))
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    assert not build.build_or_warn()
    assert "WARNING" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_cxx_may_carry_flags(monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -O")
    assert build.find_compiler() == [sys.executable, "-O"]


def test_other_machines_get_plain_code(monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    assert [name for name, _, _ in build.units()] == [
        "isa_generic",
        "dense_isa_generic",
        "api",
        "dense_api",
        "sampler",
    ]


def test_the_hash_follows_the_sources(monkeypatch, tmp_path):
    copy = tmp_path / "cpu"
    shutil.copytree(build.SOURCES, copy)
    monkeypatch.setattr(build, "SOURCES", copy)
    before = build.source_hash()
    with (copy / "scan.h").open("a") as file:
        file.write("\n")
    assert build.source_hash() != before


def test_it_needs_nothing_installed():
    """By path, isolated from every installed package."""
    code = f"import runpy; runpy.run_path({str(ROOT / 'kernels' / 'build.py')!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


@pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("nm")), reason="needs a compiler and nm"
)
@pytest.mark.parametrize("name", [n for n, source, _ in build.units() if "isa" in source])
def test_units_with_special_instructions_share_no_symbol(name: str, tmp_path: Path):
    """A shared inline function would bring them to machines without. -O0 hides none by inlining."""
    source, flags = next((source, flags) for n, source, flags in build.units() if n == name)
    made = tmp_path / "isa.o"
    command = ["g++", "-std=c++17", "-O0", *flags, "-c", str(build.SOURCES / source)]
    subprocess.run([*command, "-o", str(made)], check=True)
    listed = subprocess.run(
        ["nm", "--defined-only", "--extern-only", "-C", str(made)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    symbols = {line.split(" ", 2)[2] for line in listed.splitlines()}
    table, _, instructions = name.rpartition("isa_")
    expected = {"": "kernels", "dense_": "dense"}[table]
    # Neither of these is code: what exceptions refer to, and tiles in memory.
    symbols -= {"DW.ref.__gxx_personality_v0", "draftwire::tile_memory"}
    assert symbols == {f"draftwire::{expected}_{instructions}()"}
