"""Prompts made of a file's text: of Python source, and of prose."""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

WORDS = (20, 120)  # of a paragraph that something can be made of
SHORT, LONG = 40, 1200  # characters of a prompt


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


def of_text(text: str, python: bool, draw: random.Random) -> Iterator[Prompt]:
    """Those that are neither short nor long; what is drawn decides which."""
    make = _of_python if python else _of_prose
    yield from (p for p in make(text, draw) if SHORT <= len(p.text or p.said) <= LONG)


def _of_python(source: str, draw: random.Random) -> Iterator[Prompt]:
    tree = _parsed(source)
    if tree is None:
        return
    lines = [line + "\n" for line in source.split("\n")]  # as the parser counts them
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


def _parsed(source: str) -> ast.Module | None:
    """None for what is not Python; what the parser only warns of is nobody's business here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


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
