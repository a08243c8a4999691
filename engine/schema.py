"""What is done to a JSON schema before llguidance compiles it, so that what comes out is valid.

llguidance takes some things more loosely than JSON Schema does:

- An additional key may be spelled with escapes, and so be one that the schema knows. Outputs have
  no `\\u` escapes, nor the control characters that have no other.
- Classes in patterns (`engine.schema_pattern`).
- Any month has 31 days, any minute a leap second. Dates and times get a pattern beside the format.
- Keywords of drafts before 4 mean nothing. They are refused, and so are options of llguidance that
  a schema may bring: `lenient`, for one, leaves out all that is not supported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from engine.schema_pattern import quotable

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# For llguidance, over what a schema's `x-guidance` says. All short escapes of JSON but `\/`.
OVERRIDES: JsonCompileOptions = {
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
DEFAULTS: JsonCompileOptions = {"whitespace_flexible": False}

OPTIONS, OPTION = "x-guidance", "whitespace_flexible"
DATA = ("const", "enum")  # keywords whose values are no schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
OLD_DRAFT = re.compile(r"json-schema\.org/draft-0[0-3]/")
NO_SHORT_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")

YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
FOURTH = "(0[48]|[2468][048]|[13579][26])"
DATE = (
    rf"({YEAR}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    rf"|{YEAR}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|{YEAR}-02-(0[1-9]|1[0-9]|2[0-8])"
    rf"|([0-9]{{2}}{FOURTH}|{FOURTH}00)-02-29)"
)
TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
PATTERNS = {"date": f"^{DATE}$", "time": f"^{TIME}", "date-time": f"^{DATE}[Tt]{TIME}"}


def sound(text: str) -> str:
    """The schema as it is to be compiled, with OVERRIDES and DEFAULTS.

    Raises ValueError, which says what is wrong with it.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the schema is no JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("the schema is neither a JSON object nor true")  # noqa: TRY004
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("the schema has half of a surrogate pair") from None
    _check_options(schema.get(OPTIONS, {}))
    parts = list(_parts(schema))
    known = {id(part) for part in parts}
    for part in parts:
        _check_reference(part.get("$ref"), schema, known)
    for part in parts:
        _check(part)
        _rewrite_patterns(part)
        _restrict_format(part)
    return json.dumps(schema)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """`schema` and all in it that may be a schema, also below unknown keywords: `$ref` can point
    there."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield part
            for key, value in part.items():
                if key in NAMED and isinstance(value, dict):
                    waiting += value.values()
                elif key not in DATA:
                    waiting.append(value)


def _check_options(options: Any) -> None:
    unknown = sorted(set(options) - {OPTION}) if isinstance(options, dict) else [str(options)]
    if unknown:
        raise ValueError(f"{OPTIONS}: {unknown[0]} is not supported; {OPTION} is")


def _check_reference(reference: Any, schema: Any, known: set[int]) -> None:
    """What is referred to must be among what is looked at as a schema."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return
    place = schema
    for step in unquote(reference[2:]).split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and step in place:
            place = place[step]
        elif isinstance(place, list) and step.isdecimal() and int(step) < len(place):
            place = place[int(step)]
        else:
            return  # to nothing: the library says so
    if isinstance(place, dict) and id(place) not in known:
        raise ValueError(f"$ref: {reference} is not where a schema is")


def _check_count(part: dict[str, Any]) -> None:
    """A key that the schema does not name may come twice, and then counts once."""
    least, required = part.get("minProperties"), part.get("required")
    named = len(required) if isinstance(required, list) else 0
    closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if isinstance(least, int | float) and least > named + 1 and not closed:
        raise ValueError(
            "minProperties: more than one key that is not required needs additionalProperties false"
        )


def _check(part: dict[str, Any]) -> None:
    _check_count(part)
    draft = part.get("$schema")
    if isinstance(draft, str) and OLD_DRAFT.search(draft):
        raise ValueError(f"$schema: {draft} is older than draft 4, the first that is supported")
    for keyword in ("const", "enum"):
        if any(map(NO_SHORT_ESCAPE.search, _strings(part.get(keyword)))):
            raise ValueError(f"{keyword}: control characters other than \\b \\t \\n \\f \\r")


def _strings(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()


def _rewrite_patterns(part: dict[str, Any]) -> None:
    if isinstance(part.get("pattern"), str):
        part["pattern"] = quotable(part["pattern"])
    keys = part.get("patternProperties")
    if isinstance(keys, dict):
        part["patternProperties"] = {quotable(key): value for key, value in keys.items()}


def _restrict_format(part: dict[str, Any]) -> None:
    form = part.get("format")
    pattern = PATTERNS.get(form) if isinstance(form, str) else None
    if pattern is None:
        return
    if "pattern" not in part:
        part["pattern"] = pattern
    elif isinstance(part.get("allOf", []), list):
        part["allOf"] = [*part.get("allOf", []), {"pattern": pattern}]
