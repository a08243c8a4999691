"""From what a user calls a model to a directory that the engine can load."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ModelError
from service.models.catalogue import CATALOGUE, CatalogueModel, known_names
from service.models.errors import UnknownModel
from service.models.hub import snapshot
from service.models.programs import Programs
from service.models.progress import Report, silent
from service.models.pull import pull
from service.models.store import Store, home_directory

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Supply:
    """Finds, fetches and converts models."""

    store: Store
    programs: Programs = field(default_factory=Programs)
    report: Report = silent
    catalogue: tuple[CatalogueModel, ...] = CATALOGUE
    snapshot: Callable[[str, Report], Path] = snapshot

    @classmethod
    def of_user(cls, environ: Mapping[str, str], report: Report = silent) -> Supply:
        """The one below $DRAFTWIRE_HOME."""
        return cls(Store(home_directory(environ)), report=report)

    def resolve(self, ref: str) -> Path:
        """The ready directory of `ref`: a supplied name, a directory, a GGUF file or a hub id.

        What is missing is fetched and converted, once. Raises ModelError. Blocks.
        """
        for model in self.catalogue:
            if model.name == ref:
                return pull(model, self.store, self.programs, self.report)
        path = Path(ref).expanduser()
        if ref and path.is_file():
            return self._converted(path.resolve(), [path.resolve()])
        if ref and path.is_dir():
            return self._directory(path)
        if HUB_ID.fullmatch(ref):
            return self._directory(self.snapshot(ref, self.report))
        raise UnknownModel(
            f"no model {ref!r}: it is no path, no hub id (ORG/NAME) and none of the supplied "
            f"models ({', '.join(known_names())})"
        )

    def _directory(self, directory: Path) -> Path:
        """`directory` itself if the engine can load it as it is, else a completed one."""
        if not (directory / "config.json").is_file():
            files = sorted(directory.glob("*.gguf"))
            hint = f"; for {files[0].name} in it name that file" if files else ""
            raise ModelError(f"{directory} has no config.json{hint}")
        if not any(directory.glob("*.safetensors")):
            raise ModelError(f"{directory} has no safetensors weights")
        if (directory / "tokenizer.json").is_file():
            return directory.absolute()
        return self._converted(directory.resolve(), directory.iterdir())

    def _converted(self, source: Path, files: Iterable[Path]) -> Path:
        """The result of converting `source`, kept until one of `files` changes."""
        stats = [(file.name, file.stat()) for file in sorted(files)]
        state = repr((str(source), [(n, s.st_size, s.st_mtime_ns) for n, s in stats]))
        name = f"{source.stem}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
        if ready := self.store.ready(name):
            return ready
        with self.store.lock(name, lambda: self.report(f"waiting: {source.name} is in work")):
            if ready := self.store.ready(name):
                return ready
            self.store.remove_outdated(name)
            self.report(f"converting {source.name}")
            self.programs.convert(source, self.store.directory(name))
        return self.store.directory(name)


def resolve(ref: str, report: Report = silent) -> Path:
    """`Supply.resolve` for this user."""
    return Supply.of_user(os.environ, report).resolve(ref)
