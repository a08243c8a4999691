"""Regular expressions of a JSON schema, written so that llguidance quotes them rightly.

Where a class has all control characters, llguidance 1.9 lets `\\"` and `\\\\` come for it, whether
or not the class has a quote or a backslash: `[^"]` does not keep quotes out. So every class loses
U+0001, which outputs cannot have anyway (`engine.schema`), and with it the error. One that plainly
lists printable characters is left as it is.
"""

from __future__ import annotations

import re

LOST = "\\x01"
ESCAPE = re.compile(r"\\(?:[pP](?:\{[^}]{0,64}\}|[^{])|.)", re.DOTALL)
PLAIN = re.compile(r"\[[ -Z_-~]+\]")
# Where a class begins; a bracket that comes first is one of its characters.
OPEN = re.compile(r"\[\^?\]?")
SETS = re.compile("&&|--|~~")  # of two classes, in Rust
U_0001 = re.compile(r"\x01|\\(?:x01|u0001|U00000001|[xuU]\{0*1\})")


def quotable(pattern: str) -> str:
    """The same for all texts without U+0001. Raises ValueError if it asks for that."""
    made, place = [], 0
    while place < len(pattern):
        if U_0001.match(pattern, place):
            raise ValueError(f"pattern {pattern}: outputs have no U+0001")
        end = _end(pattern, place)
        piece = pattern[place:end]
        if piece[0] == "[" and (SETS.search(piece, 1) or _nested(piece)):
            raise ValueError(f"pattern {pattern}: JSON Schema has no classes of classes")
        is_class = piece[0] == "[" or piece[:2] in ("\\p", "\\P")
        may_err = is_class and not PLAIN.fullmatch(piece)
        made.append(f"[{piece}--{LOST}]" if may_err else piece)
        place = end
    return "".join(made)


def _nested(piece: str) -> bool:
    """Whether a class has another one in it."""
    place = OPEN.match(piece).end()  # type: ignore[union-attr]
    while place < len(piece):
        if escape := ESCAPE.match(piece, place):
            place = escape.end()
        elif piece[place] == "[":
            return True
        else:
            place += 1
    return False


def _end(pattern: str, place: int) -> int:
    """Of the character, escape or class there. One that has no end goes to the end of all."""
    if escape := ESCAPE.match(pattern, place):
        return escape.end()
    if pattern[place] != "[":
        return place + 1
    depth = 0
    while place < len(pattern):
        if escape := ESCAPE.match(pattern, place):
            place = escape.end()
        elif opening := OPEN.match(pattern, place):
            depth += 1
            place = opening.end()
        else:
            depth -= pattern[place] == "]"
            place += 1
            if not depth:
                break
    return place
