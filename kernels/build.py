"""Build `_cpu.so` from `cpu/*.cpp`: a hook of the package's build, and `python -m kernels.build`.

Standard library alone: it runs before anything is installed. Without a compiler, or if compiling
fails, it warns and leaves no library: the operations then run in torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "cpu"
LIBRARY = Path(__file__).parent / "_cpu.so"

FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
_AVX512 = ["-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
_X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": _AVX512,
    "avx512bf16": [*_AVX512, "-mavx512bf16"],
    "amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DDRAFTWIRE_TILES"],
    "amx_emulated": ["-mavx2", "-mfma", "-mf16c", "-DDRAFTWIRE_TILES", "-DDRAFTWIRE_EMULATE_TILES"],
}


class BuildError(Exception):
    """Why there is no library."""


def build(library: Path = LIBRARY) -> None:
    """Compile and put `library` in place in one move; raises BuildError."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        made = Path(folder) / library.name
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda unit: _compile(compiler, Path(folder), *unit), units()))
        _run([*compiler, "-shared", "-fopenmp", "-o", str(made), *objects])
        os.replace(made, library)


def find_compiler() -> list[str]:
    """The first of $CXX, g++, c++ and clang++ that exists."""
    for command in (os.environ.get("CXX", "").split(), ["g++"], ["c++"], ["clang++"]):
        if command and shutil.which(command[0]):
            return command
    raise BuildError("no C++ compiler ($CXX, g++, c++, clang++)")


def units() -> list[tuple[str, str, list[str]]]:
    """(object name, source, flags) of each translation unit: isa.cpp once per instruction set."""
    sets: dict[str, list[str]] = {"generic": []}
    if platform.machine().lower() in ("x86_64", "amd64"):
        sets |= _X86
    variants = [
        (f"{source}_{name}", f"{source}.cpp", [*flags, f"-DDRAFTWIRE_ISA={name}"])
        for source in ("isa", "dense_isa")
        for name, flags in sets.items()
    ]
    version = f'-DDRAFTWIRE_VERSION="{source_hash()}"'
    return [*variants, *((s, f"{s}.cpp", [version]) for s in ("api", "dense_api", "sampler"))]


def source_hash() -> str:
    """Sixteen hex digits that change with the sources or their flags."""
    digest = hashlib.sha256(repr((FLAGS, _X86)).encode())
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: list[str], folder: Path, name: str, source: str, flags: list[str]) -> str:
    made = folder / f"{name}.o"
    _run([*compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(made)])
    return str(made)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-2000:]}")


def build_or_warn() -> bool:
    """Whether there is a library now; says on stderr why not. An older one does not stay."""
    try:
        build()
    except (BuildError, OSError) as why:
        LIBRARY.unlink(missing_ok=True)
        print(f"WARNING: draftwire: no C++ kernels, torch is used instead: {why}", file=sys.stderr)
        return False
    return True


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand where the build back-end is not installed
    pass
else:

    class CustomBuildHook(BuildHookInterface):  # type: ignore[misc,type-arg,unused-ignore]
        """Hatchling's hook: builds the library into wheels and editable installs."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Before a build; a wheel with the library is for one platform only."""
            if self.target_name == "wheel" and build_or_warn():
                build_data["pure_python"] = False
                build_data["infer_tag"] = True


if __name__ == "__main__":
    sys.exit(0 if build_or_warn() else 1)
