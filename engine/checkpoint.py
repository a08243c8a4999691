"""The files of a model directory, read and checked without building the model.

A ready directory holds config.json, model.safetensors (or shards with their index),
tokenizer.json, and mostly generation_config.json, tokenizer_config.json and chat_template.jinja.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from engine.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ORIGIN = "draftwire.json"  # written by the conversion: where the weights come from
SAMPLE = 4096  # bytes hashed of each tensor


def read_json(directory: Path, name: str, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} where it is optional and missing. Raises ModelError."""
    path = directory / name
    try:
        if not path.is_file():
            if optional:
                return {}
            found = "has no " + name if directory.is_dir() else "is not a directory"
            raise ModelError(f"{directory} {found}")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files, complete by what their headers say. Raises ModelError."""
    names = {WEIGHTS}
    if not (directory / WEIGHTS).is_file() and (directory / INDEX).is_file():
        names = set(map(str, read_json(directory, INDEX).get("weight_map", {}).values()))
    paths = tuple(directory / name for name in sorted(names))
    for path in paths:
        if not path.is_file():
            raise ModelError(f"model {directory} has no {path.name}")
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is corrupt or cut short: {error}") from None
    return paths


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in tokenizer.json. Raises ModelError."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"model {directory} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer: {error}") from None


def hash_weights(directory: Path, files: tuple[Path, ...]) -> str:
    """A fast hash of the weights: SHA-256 over names, headers, 4 KiB of every tensor, and origin.

    Names, shapes and dtypes alone would be equal for two trainings of one architecture, and
    hashing gigabytes would cost each start seconds. The origin is draftwire.json, which holds
    the SHA-256 of what was converted.
    """
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length)
            digest.update(path.name.encode() + b"\0" + header)
            for offset in sorted(_offsets(header)):
                file.seek(8 + length + offset)
                digest.update(file.read(SAMPLE))
    origin = directory / ORIGIN
    digest.update(origin.read_bytes() if origin.is_file() else b"")
    return digest.hexdigest()


def _offsets(header: bytes) -> list[int]:
    return [t["data_offsets"][0] for n, t in json.loads(header).items() if n != "__metadata__"]
