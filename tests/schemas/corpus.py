"""Where the schemas come from: JSON-Schema-Test-Suite, and files that people write by schema.

The suite is here (`suite.jsonl`, MIT, see LICENSE.suite). The others (pipelines, workflows,
citations) are those that the check-jsonschema wheel vendors, each under its publisher's licence; it
is downloaded once and never installed. Of such a file each definition is a schema by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.grammars import MOST_BYTES
from service.models.programs import Programs
from service.models.store import home_directory

SUITE = Path(__file__).with_name("suite.jsonl")
DRAFT = "https://json-schema.org/draft/2020-12/schema"
# Python's `re`, by which outputs are judged, is not the regular expressions of ECMA 262.
OTHER_REGEX = "optional/ecmascript-regex"
WHEEL = "check-jsonschema==0.39.0"
WHEEL_SHA256 = "14ce5c94871c551268ea948ffe21e9f1464dc48fb20bf9a4c13deeaaf756cf9b"
VENDORED = "check_jsonschema/builtin_schemas/vendor/"
DEFINITIONS = ("definitions", "$defs")


@dataclass(frozen=True)
class Schema:
    """`text` is what a client sends. `source` is the file it is from, `about` what is asked for."""

    source: str
    name: str
    about: str
    text: str


@dataclass(frozen=True)
class Group:
    """Of the suite: a schema, values that it accepts and values that it does not."""

    schema: Schema
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def suite() -> Iterator[Group]:
    """Groups whose schema is an object."""
    for line in SUITE.read_text(encoding="utf-8").splitlines():
        group = json.loads(line)
        source, _, about = group["name"].partition(": ")
        if isinstance(group["schema"], dict) and source != OTHER_REGEX:
            schema = Schema(source, group["name"], about, json.dumps(group["schema"]))
            yield Group(schema, tuple(group["valid"]), tuple(group["invalid"]))


def vendored(wheel: Path) -> Iterator[Schema]:
    """Whole files and their definitions, as far as they are not too large for a request."""
    with zipfile.ZipFile(wheel) as archive:
        for file in sorted(archive.namelist()):
            if file.startswith(VENDORED) and file.endswith(".json"):
                source = file.removeprefix(VENDORED).removesuffix(".json")
                yield from _of_file(source, json.loads(archive.read(file)))


def fetch_wheel() -> Path:
    """The wheel of `vendored`, downloaded unless it is here. RuntimeError if it is another one."""
    kept = home_directory(os.environ) / "downloads" / f"{WHEEL}.whl"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            Programs().download(WHEEL, Path(scratch), lambda size: None).rename(kept)
    found = hashlib.sha256(kept.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        kept.unlink()
        raise RuntimeError(f"{WHEEL} has SHA-256 {found}, expected {WHEEL_SHA256}")
    return kept


def _of_file(source: str, schema: dict[str, Any]) -> Iterator[Schema]:
    found = [(source, schema)]
    for keyword in DEFINITIONS:
        known = schema.get(keyword, {})
        found += [(f"{source}#{name}", _alone(schema, keyword, name)) for name in known]
    for name, part in found:
        text = json.dumps(part)
        if len(text) <= MOST_BYTES:
            yield Schema(source, name, _about(name, part), text)


def _alone(schema: dict[str, Any], keyword: str, name: str) -> dict[str, Any]:
    """The schema of one definition, with the definitions that it needs."""
    known, needed, waiting = schema[keyword], {}, [name]
    while waiting:
        wanted = waiting.pop()
        if wanted in known and wanted not in needed:
            needed[wanted] = known[wanted]
            waiting += [_unescaped(ref, keyword) for ref in _refs(known[wanted])]
    escaped = name.replace("~", "~0").replace("/", "~1")
    return {
        "$schema": schema.get("$schema", DRAFT),
        "$ref": f"#/{keyword}/{escaped}",
        keyword: needed,
    }


def _unescaped(ref: str, keyword: str) -> str:
    name = ref.removeprefix(f"#/{keyword}/").partition("/")[0]
    return name.replace("~1", "/").replace("~0", "~")


def _refs(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from _refs(value)
    elif isinstance(part, list):
        for value in part:
            yield from _refs(value)


def _about(name: str, part: dict[str, Any]) -> str:
    source, _, definition = name.partition("#")
    inner = next((part[k].get(definition) for k in DEFINITIONS if definition and k in part), part)
    said = inner.get("title") or inner.get("description") if isinstance(inner, dict) else ""
    return f"{source} {definition} {said or ''}".strip()[:100]
