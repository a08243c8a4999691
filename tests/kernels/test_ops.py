"""Choosing an implementation, and what loading it does to the process."""

from __future__ import annotations

import ctypes
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import build, reference
from kernels.cpu import library as cpu
from kernels.ops import REFERENCE, load_ops
from tests.kernels.conftest import libraries

ROOT = Path(__file__).parents[2]


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_is_light():
    assert python("import kernels, sys; print('torch' in sys.modules)") == "False"


def test_the_cpu_has_its_library_and_others_the_reference():
    ops = load_ops("cpu")
    if libraries():
        assert ops.name == "cpu"
        assert ops.library is not None
        assert ops.isa == list(libraries())[-1]  # the best of this machine
        assert ops.version == build.source_hash()
    else:
        assert ops is REFERENCE
    assert load_ops("cuda") is REFERENCE
    assert REFERENCE.sample_rows is reference.sample_rows
    assert REFERENCE.library is None


def test_without_a_library_there_is_the_reference(monkeypatch, tmp_path):
    assert cpu.load(path=tmp_path / "none.so") is None
    monkeypatch.setattr(cpu, "load", lambda: None)
    assert load_ops("cpu") is REFERENCE


@pytest.mark.skipif(not build.LIBRARY.exists(), reason="not built")
class TestEnvironment:
    @pytest.mark.parametrize("isa", list(libraries()))
    def test_an_instruction_set_can_be_forced(self, monkeypatch, isa):
        monkeypatch.setenv("DRAFTWIRE_ISA", isa)
        assert load_ops("cpu").isa == isa

    @pytest.mark.parametrize("isa", ["avx", "AVX2", "amx2"])
    def test_an_unknown_one_is_an_error(self, monkeypatch, isa):
        monkeypatch.setenv("DRAFTWIRE_ISA", isa)
        with pytest.raises(ValueError, match=isa):
            load_ops("cpu")

    def test_empty_means_the_best(self, monkeypatch):
        monkeypatch.setenv("DRAFTWIRE_ISA", "")
        assert load_ops("cpu").isa == list(libraries())[-1]

    def test_a_library_of_another_version_is_an_error(self, monkeypatch):
        monkeypatch.setattr(cpu, "_ABI", -1)
        with pytest.raises(RuntimeError, match="another version"):
            load_ops("cpu")

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_there_is_one_openmp_runtime(self):
        """torch's pool of threads is ours: a second one would fight it for the cores."""
        code = (
            "import re; from kernels.ops import load_ops; load_ops('cpu')\n"
            "maps = open('/proc/self/maps').read()\n"
            r"print(*{p for p in re.findall(r'\S+$', maps, re.M) if re.search('gomp|omp5', p)})"
        )
        assert len(python(code).split()) == 1

    def test_the_interpreter_runs_on_during_a_call(self):
        """CDLL gives up the interpreter's lock around a call; PyDLL, derived from it, does not."""
        assert type(next(iter(libraries().values())).native) is ctypes.CDLL


def test_every_op_has_the_references_signature():
    for name in ("write_kv", "paged_attention", "sample_rows"):
        ours = list(inspect.signature(getattr(cpu.Library, name)).parameters.values())[1:]
        assert ours == list(inspect.signature(getattr(reference, name)).parameters.values())


def test_torchs_thread_count_is_kept():
    case_threads = torch.get_num_threads()
    load_ops("cpu")
    assert torch.get_num_threads() == case_threads
