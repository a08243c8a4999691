"""Whether an output is what its schema asks for, as the `jsonschema` library sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for
from llguidance import LLMatcher
from tokenizers import Tokenizer

# What brings an output to its end, tried in this order wherever it may come.
CLOSING = ('"', "}", "]", ":", "0", "1", ",", '{"', "a", "-", "/", ".", "@", "true", "null")
MOST_CLOSING = 400
PRECISION = 10_000  # digits, more than an output has


def load(text: str) -> Any:
    """Numbers as they are written: 0.3 is a multiple of 0.0001. Infinity, if beyond Decimal."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def wrong(schema: str, output: str) -> str:
    """Empty if `output` is JSON and valid under the draft that `schema` names, formats included."""
    try:
        value = load(output)
    except ValueError as error:
        return f"no JSON: {error}"
    known = load(schema)
    validator = validator_for(known, default=jsonschema.Draft202012Validator)
    checker = validator.FORMAT_CHECKER
    with localcontext(prec=PRECISION):
        error = next(validator(known, format_checker=checker).iter_errors(value), None)
    return "" if error is None else error.message


class Closer:
    """Goes on from an output that was cut off, to see that it was the beginning of a valid one."""

    def __init__(self, tokenizer: Tokenizer, ends: Seq[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._ends = list(ends)
        self._vocab_size = vocab_size
        self._closing = [
            tokenizer.encode(text, add_special_tokens=False).ids[0] for text in CLOSING
        ]

    def close(self, start: LLMatcher, ids: Seq[int]) -> str | None:
        """The text of `ids` and what had to follow; None if no end was found soon. ValueError if
        they cannot be the beginning, or nothing can follow."""
        matcher = start.deep_copy()
        if matcher.try_consume_tokens(list(ids)) != len(ids):
            raise ValueError("not the beginning of an output")
        made = list(ids)
        while not matcher.is_accepting():
            if len(made) == len(ids) + MOST_CLOSING:
                return None
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
            allowed[self._ends] = 0
            if not allowed.any():
                raise ValueError(f"nothing can follow: {matcher.get_error()}")
            chosen = next((t for t in self._closing if allowed[t]), int(allowed.argmax()))
            matcher.consume_token(chosen)
            made.append(chosen)
        return str(self._tokenizer.decode(made))
