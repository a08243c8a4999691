"""What a JSON schema lets through is valid: where llguidance by itself is too loose, one by one."""

from __future__ import annotations

import json
import re
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.grammar import Grammars
from engine.request import GrammarParams
from engine.schema import sound
from engine.schema_pattern import quotable
from tests.engine.vocabularies import END, byte_level, encode

VOCAB = 420
DRAFT_3 = "http://json-schema.org/draft-03/schema#"
INTEGER_A = {"properties": {"a": {"type": "integer"}}}


@cache
def grammars() -> Grammars:
    return Grammars(byte_level(), VOCAB, (byte_level().token_to_id(END),))


def comes(schema: dict[str, Any], text: str) -> bool:
    """Whether `text` can be the output."""
    matcher = grammars().matcher(GrammarParams("json_schema", json.dumps(schema))).deep_copy()
    ids = encode(byte_level(), text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INTEGER_A, '{"a":1}', r'{"\u0061":"x"}'),
        (INTEGER_A, '{"b":"x"}', r'{"a\u0061":"x"}'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, '{"ab":1}', r'{"\u0061":"x"}'),
        ({"properties": {"a\n": {"type": "integer"}}}, r'{"a\n":1}', r'{"a\u000a":"x"}'),
        ({"pattern": '^[^"]+$'}, '"ab"', r'"a\"b"'),
        ({"pattern": r"^[^\\]+$"}, '"ab"', r'"a\\b"'),
        ({"properties": {"x": {"pattern": '^[^"]*$'}}}, r'{"x":"\n"}', r'{"x":"\""}'),
        ({"$defs": {"x": {"pattern": '[^"]'}}, "$ref": "#/$defs/x"}, '"a"', r'"\""'),
        ({"properties": {"enum": {"pattern": '[^"]'}}}, '{"enum":"a"}', r'{"enum":"\""}'),
        ({"$ref": "#/x/0", "x": [{"pattern": '[^"]'}]}, '"a"', r'"\""'),
        ({"allOf": [{"pattern": r"^\P{Po}$"}]}, '"a"', r'"\""'),
        (
            {"patternProperties": {'^[^"]$': {}}, "additionalProperties": False},
            '{"a":1}',
            r'{"\"":1}',
        ),
        ({"format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        ({"format": "date"}, '"2023-12-31"', '"2023-11-31"'),
        ({"format": "date"}, '"0001-01-01"', '"0000-01-01"'),
        ({"format": "date", "pattern": "^2"}, '"2023-01-31"', '"2023-02-30"'),
        ({"format": "date", "pattern": "^2"}, '"2023-01-31"', '"1023-01-31"'),
        (
            {"items": {"format": "date-time"}},
            '["2024-02-29T23:59:59Z"]',
            '["2024-02-30T00:00:00Z"]',
        ),
        ({"format": "date-time"}, '"2024-02-29t00:00:00+01:00"', '"2016-12-31T22:59:60Z"'),
        ({"format": "time"}, '"22:59:59Z"', '"22:59:60Z"'),
        ({"format": "date"}, "7", '"7"'),
        ({"properties": {"format": {"const": "date"}}}, '{"format":"date"}', '{"format":"x"}'),
        ({"const": {"format": "date", "pattern": "[a]"}}, '{"format":"date","pattern":"[a]"}', "1"),
    ],
)
def test_too_loose_by_itself(schema: dict[str, Any], good: str, bad: str) -> None:
    assert comes(schema, good)
    assert not comes(schema, bad)


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ({"$schema": DRAFT_3, "disallow": "string"}, "older than draft 4"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "lenient is not supported"),
        ({"x-guidance": {"coerce_one_of": True}}, "coerce_one_of is not supported"),
        ({"x-guidance": {"item_separator": "x"}}, "item_separator is not supported"),
        ({"x-guidance": 7}, "7 is not supported"),
        ({"enum": ["a", "\x01"]}, "enum: control characters"),
        ({"items": {"const": {"a": ["\x1f"]}}}, "const: control characters"),
        ({"pattern": "[a"}, "regex parse error"),
        ({"pattern": '[^"]|\x01'}, "no U\\+0001"),
        ({"pattern": r'[^"]|\x{1}'}, "no U\\+0001"),
        ({"patternProperties": {r'[^"]|\u0001': {}}}, "no U\\+0001"),
        ({"pattern": "^[a[b]]$"}, "no classes of classes"),
        ({"pattern": "[a-z&&[^b]]"}, "no classes of classes"),
        ({"pattern": "[a-z--b]"}, "no classes of classes"),
        ({"pattern": "[a~~b]"}, "no classes of classes"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"minProperties": 3, "required": ["a"], "patternProperties": {"x": {}}}, "minProperties"),
        ({"$ref": "#/foo/properties", "foo": {"properties": {"type": "string"}}}, "no|not where"),
        ({"$ref": "#/enum/0", "enum": [{"pattern": '[^"]'}]}, "not where a schema is"),
        ({"$ref": "#/%65num/0", "enum": [{"pattern": '[^"]'}]}, "not where a schema is"),
        ({"x-guidance": {"\ud800": 1}}, "half of a surrogate pair"),
        ({"pattern": "\x01\ud800"}, "half of a surrogate pair"),
        ({"$schema": "json-schema.org/draft-03/\udfff"}, "half of a surrogate pair"),
    ],
)
def test_refused_by_name(schema: dict[str, Any], cause: str) -> None:
    with pytest.raises(InvalidRequest, match=cause):
        comes(schema, "1")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 1},
        {"type": "object", "minProperties": 2, "required": ["a"]},
        {"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
    ],
)
def test_counts_that_no_key_can_spoil(schema: dict[str, Any]) -> None:
    assert json.loads(sound(json.dumps(schema))) == schema


def test_references_to_schemas_of_all_places() -> None:
    schema = {
        "$ref": "#/$defs/a~1b",
        "$defs": {"a/b": {"items": {"$ref": "#/$defs/c%20d/anyOf/1"}}, "c d": {"anyOf": [{}, {}]}},
        "x-own": {"deep": [{"type": "null"}, {"$ref": "#/x-own/deep/0"}, {"$ref": "#"}]},
    }
    assert json.loads(sound(json.dumps(schema))) == schema


def test_true_is_any_value() -> None:
    assert sound("true") == "{}"


def test_a_long_pattern_takes_no_longer_than_its_length() -> None:
    """Escapes that have no end were looked for to the end of all, each."""
    begun = time.process_time()
    sound(json.dumps({"$defs": {"a": {"pattern": r"\p{" * 16_000}}}))
    assert time.process_time() - begun < 0.5


def test_blanks_may_be_asked_for() -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_flexible": True}}
    assert comes(schema, "[ 1 ]")
    assert not comes({"type": "array"}, "[ 1 ]")


def test_what_needs_no_change_stays() -> None:
    schema = {"type": "object", "properties": {"b": {"enum": [1, "é"]}, "a": {"pattern": "x+"}}}
    assert list(json.loads(sound(json.dumps(schema)))["properties"]) == ["b", "a"]
    assert json.loads(sound(json.dumps(schema))) == schema


CLASSES = (
    *('[^"]', r"[^\\]", r'[^"\\]', "[^a]", "[ab]", r"[\w.-]", r"[^\s]", r"[\x00-!#-~]", '["^]'),
    *(r"[\]a]", "[^]a]", r"[a-z-]", r"\S", r"\d", ".", "a", r"\.", r"\\", '"', r"[\d\D]"),
)
TEXTS = ("", *'\\"\n\ta7]^-. ', "a\\", '"a', "ab", "a\n")


@given(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3), st.sampled_from(["", "+", "?"]))
def test_patterns_are_those_of_the_texts_that_they_match(pieces: list[str], times: str) -> None:
    pattern = f"^({''.join(pieces)}){times}$"
    for text in TEXTS:
        matches = re.search(pattern.replace("$", r"\Z"), text) is not None
        assert comes({"type": "string", "pattern": pattern}, json.dumps(text)) == matches


@pytest.mark.parametrize(
    ("pattern", "made"),
    [
        ("a[^b]c", r"a[[^b]--\x01]c"),
        ("[0-9a][+-]", "[0-9a][+-]"),
        ("[b\x05]", "[[b\x05]--\\x01]"),
        (r"\[[^\]]*\]", r"\[[[^\]]--\x01]*\]"),
        (r"[^]]|[]]", r"[[^]]--\x01]|[[]]--\x01]"),
        (r"[a\[&]d", r"[[a\[&]--\x01]d"),
        (r"\p{L}\PN\d", r"[\p{L}--\x01][\PN--\x01]\d"),
        ("", ""),
    ],
)
def test_where_classes_end(pattern: str, made: str) -> None:
    assert quotable(pattern) == made
