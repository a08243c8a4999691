"""Fetches a model from a Hugging Face hub, in the hub library's own cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from service.models.errors import DownloadFailed
from service.models.progress import Report

WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
UNWANTED = ["*/*"]  # other formats and earlier checkpoints live in subdirectories


def snapshot(repository: str, report: Report) -> Path:
    """The directory of `repository` (ORG/NAME), complete. Raises DownloadFailed.

    A complete copy in the cache is used without asking the hub; HF_HUB_OFFLINE is respected.
    """
    # Here, since the import costs half a second that no other kind of model needs.
    from huggingface_hub import snapshot_download

    def fetch(**options: Any) -> Path:
        return Path(
            snapshot_download(
                repository, allow_patterns=WANTED, ignore_patterns=UNWANTED, **options
            )
        )

    try:
        return fetch(local_files_only=True)
    except FileNotFoundError:  # not there, or not all of it
        report(f"downloading {repository}")
    try:
        return fetch(tqdm_class=_bars(f"downloading {repository}", report))
    except Exception as error:  # its own, the transport's and the system's
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DownloadFailed(f"the hub did not deliver {repository}: {cause}") from error


def _bars(stage: str, report: Report) -> type:
    """A tqdm class that draws nothing and reports bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bytes(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._nowhere = open(os.devnull, "w")  # noqa: SIM115, closed below
            kwargs |= {"file": self._nowhere, "disable": False}
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            if self.unit == "B":
                report(stage, int(self.n), int(self.total or 0))
            return bool(drawn)

        def close(self) -> None:
            super().close()
            self._nowhere.close()

    return Bytes
