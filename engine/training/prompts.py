"""Prompts to let a target write from: out of files that anyone has.

- `.py`: each function that has a docstring, up to the end of that; a function's first lines; and
  questions about it.
- `.md`, `.rst`, `.txt`: the beginning of each paragraph, and what people ask about a text.
- `.jsonl`: `prompt_token_ids` (what `draftwire serve --record` writes), `prompt`, `text` or
  `messages`, one a line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

from engine.training.made_prompts import Prompt, of_text

__all__ = ["Prompt", "files_of", "read_prompts"]

KINDS = (".py", ".md", ".rst", ".txt", ".jsonl")
MOST_BYTES = 1 << 20  # of a file that is looked at, unless it is lines of JSON
MIXED = 200  # prompts of a kind among which the next one is drawn
MOST_WAITING = 4000  # of a kind, for one of the other kind to come


def read_prompts(paths: Iterable[Path], seed: int) -> Iterator[Prompt]:
    """What can be made of these files and folders, file by file in an order that the seed decides;
    none twice. As many texts as chats, as long as there are both. Raises ValueError, naming the
    file, for lines that are no prompts."""
    draw = random.Random(seed)
    files = files_of(paths)
    draw.shuffle(files)
    waiting: tuple[list[Prompt], list[Prompt]] = ([], [])  # texts, chats
    for prompt in _distinct(p for path in files for p in _of_file(path, draw)):
        some = waiting[bool(prompt.said)]
        some.append(prompt)
        if min(map(len, waiting)) > MIXED:
            yield from (each.pop(draw.randrange(len(each))) for each in waiting)
        elif len(some) > MOST_WAITING:
            yield some.pop(draw.randrange(len(some)))
    rest = [*waiting[0], *waiting[1]]
    draw.shuffle(rest)
    yield from rest


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Those of the kinds above, and those in these folders, sorted, none twice. Raises ValueError
    for what is neither, and where there are none at all."""
    found: set[Path] = set()
    given = list(paths)
    for path in given:
        if path.is_dir():
            found.update(p for p in path.rglob("*") if p.suffix in KINDS and p.is_file())
        elif path.suffix in KINDS and path.is_file():
            found.add(path)
        else:
            raise ValueError(f"{path} is neither a folder nor one of {', '.join(KINDS)}")
    if not found:
        raise ValueError(f"no {', '.join(KINDS)} in {', '.join(map(str, given))}")
    return sorted(found)


def _distinct(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """The first of equals. Remembers 16 bytes of each."""
    seen: set[bytes] = set()
    for prompt in prompts:
        digest = blake2b(repr(prompt).encode(errors="surrogatepass"), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield prompt


def _of_file(path: Path, draw: random.Random) -> Iterator[Prompt]:
    if path.suffix == ".jsonl":
        yield from _of_lines(path)
    elif path.stat().st_size <= MOST_BYTES:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:  # not a text, or of another time
            return
        yield from of_text(text, path.suffix == ".py", draw)


def _of_lines(path: Path) -> Iterator[Prompt]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield _of_object(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: no prompt: {error}") from None


def _of_object(item: object) -> Prompt:
    match item:
        case {"prompt_token_ids": list(ids)}:
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError("prompt_token_ids must be token ids")
            return Prompt(ids=tuple(ids))
        case {"messages": [*_, {"content": str(said)}]}:
            return Prompt(said=said)
        case {"prompt": str(text)} | {"text": str(text)}:
            return Prompt(text=text)
    raise ValueError("none of prompt_token_ids, prompt, text and messages is there")
