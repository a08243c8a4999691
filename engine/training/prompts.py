"""Prompts to let a target write from: out of files that anyone has.

- `.py`: each function that has a docstring, up to the end of that; a function's first lines; and
  questions about it.
- `.md`, `.rst`, `.txt`: the beginning of each paragraph, and what people ask about a text.
- `.jsonl`: `prompt_token_ids` (what `draftwire serve --record` writes), `prompt`, `text` or
  `messages`, one a line.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = (".py", ".md", ".rst", ".txt", ".jsonl")
MOST_BYTES = 1 << 20  # of a file that is looked at, unless it is lines of JSON
WORDS = (20, 120)  # of a paragraph that something can be made of
SHORT, LONG = 40, 1200  # characters of a prompt
MIXED = 200  # prompts of a kind among which the next one is drawn


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of the three: a text to go on from, what is said to a chat model, or ids as they are."""

    text: str = ""
    said: str = ""
    ids: tuple[int, ...] = ()


OF_FUNCTIONS = (
    "Write a Python function named `{name}`. {doc}",
    "What does the Python function `{name}` do? Its documentation says: {doc}",
    "Write unit tests for this Python function:\n\n{code}",
    "Explain this Python code step by step:\n\n{code}",
    "Rewrite this function so that it is easier to read:\n\n{code}",
)
OF_TEXTS = (
    "Summarize the following text in two sentences:\n\n{text}",
    "Translate the following text to German:\n\n{text}",
    "Translate this to French: {line}",
    "Answer from the text.\n\nText: {text}\n\nQuestion: What is {words} about?\n\nAnswer:",
    "What are the most important facts in this text?\n\n{text}",
    "Rewrite this in plain English: {line}",
    "Write a short blog post about {words}.",
    "Explain {words} to someone who has never heard of it.",
    "Write a dialogue between a teacher and a student about {words}.",
    "What are the advantages and disadvantages of {words}?",
    "Give me five tips about {words}.",
    "Imagine you are an expert on {words}. What would you tell a beginner?",
)
OF_NUMBERS = (
    "{name} has {a} apples and buys {b} bags of {c} apples. How many apples does {name} have?",
    "A train goes {a} miles in {b} hours. How far does it go in {c} hours?",
    "What is {a} * {b} + {c}? Think step by step.",
    "A shop sells pens for ${b} each. {name} pays with ${a}00 for {c} pens. What is the change?",
    "{name} reads {a} pages a day. How many days does a book of {b}{c}0 pages take?",
)
NAMES = ("Anna", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Iris", "Jonas")


def read_prompts(paths: Iterable[Path], seed: int) -> Iterator[Prompt]:
    """What can be made of these files and folders, file by file in an order that the seed decides;
    none twice. As many texts as chats, as long as there are both. Raises ValueError, naming the
    file, for lines that are no prompts."""
    draw = random.Random(seed)
    files = sorted(_files(paths))
    draw.shuffle(files)
    seen: set[Prompt] = set()
    waiting: tuple[list[Prompt], list[Prompt]] = ([], [])  # texts, chats
    for path in files:
        for prompt in _of_file(path, draw):
            if prompt not in seen:
                seen.add(prompt)
                waiting[bool(prompt.said)].append(prompt)
        while min(map(len, waiting)) > MIXED:
            for some in waiting:
                yield some.pop(draw.randrange(len(some)))
    rest = [*waiting[0], *waiting[1]]
    draw.shuffle(rest)
    yield from rest


def _of_file(path: Path, draw: random.Random) -> Iterator[Prompt]:
    if path.suffix == ".jsonl":
        yield from _of_lines(path)
    elif path.stat().st_size <= MOST_BYTES:
        text = path.read_text(encoding="utf-8", errors="replace")
        make = _of_python if path.suffix == ".py" else _of_prose
        yield from (p for p in make(text, draw) if _fits(p))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from (p for p in path.rglob("*") if p.suffix in KINDS and p.is_file())
        elif path.suffix in KINDS and path.is_file():
            yield path
        else:
            raise ValueError(f"{path} is neither a folder nor one of {', '.join(KINDS)}")


def _fits(prompt: Prompt) -> bool:
    return SHORT <= len(prompt.text or prompt.said) <= LONG


def _of_lines(path: Path) -> Iterator[Prompt]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield _of_object(json.loads(line))
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: no prompt: {error}") from None


def _of_object(item: dict[str, object]) -> Prompt:
    match item:
        case {"prompt_token_ids": list(ids)}:
            return Prompt(ids=tuple(map(int, ids)))
        case {"messages": [*_, {"content": str(said)}]}:
            return Prompt(said=said)
        case {"prompt": str(text)} | {"text": str(text)}:
            return Prompt(text=text)
    raise ValueError("none of prompt_token_ids, prompt, text and messages is there")


def _of_python(source: str, draw: random.Random) -> Iterator[Prompt]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            yield from _of_prose(ast.get_docstring(node) or "", draw)
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("test"):
            continue
        doc = ast.get_docstring(node)
        whole = _dedent(lines[node.lineno - 1 : node.end_lineno])
        if doc:
            body = node.body[0]
            imports = "from typing import List\n\n\n" if draw.random() < 0.2 else ""
            yield Prompt(text=imports + _dedent(lines[node.lineno - 1 : body.end_lineno]))
        elif draw.random() < 0.2:
            yield Prompt(text=_dedent(lines[node.lineno - 1 : node.lineno + 3]))
        if draw.random() < 0.3:
            first = (doc or "It has no documentation.").partition("\n\n")[0]
            question = draw.choice(OF_FUNCTIONS)
            yield Prompt(said=question.format(name=node.name, doc=first, code=whole))


def _of_prose(text: str, draw: random.Random) -> Iterator[Prompt]:
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        if not WORDS[0] <= len(words) <= WORDS[1] or not paragraph[0].isalpha():
            continue
        line = " ".join(words)
        if draw.random() < 0.3:
            yield Prompt(text=" ".join(words[: len(words) // 2]))
        at = draw.randrange(len(words) - 2)
        question = draw.choice(OF_TEXTS)
        few = " ".join(words[at : at + 2]).strip(".,:;()[]`*\"'").lower()
        yield Prompt(said=question.format(text=line, line=_sentence(line), words=few))
        if draw.random() < 0.3:
            a, b, c = (draw.randrange(2, 20) for _ in range(3))
            sum_of = draw.choice(OF_NUMBERS)
            yield Prompt(said=sum_of.format(name=draw.choice(NAMES), a=a, b=b, c=c))


def _dedent(lines: list[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "".join(
        line[indent:] if line[:indent].isspace() or not indent else line for line in lines
    )


def _sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", text)[0]
