"""Prompts out of files: which, in which order, and what is passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from engine.training import prompts
from engine.training.made_prompts import LONG, SHORT
from engine.training.prompts import Prompt, files_of, read_prompts
from service.pb import draftwire_pb2 as pb
from service.recorded import to_line
from tests.service.recordings import plain_sample, recorded

WORDS = (
    "river",
    "stone",
    "lantern",
    "market",
    "winter",
    "garden",
    "letter",
    "window",
    "travel",
    "music",
    "harbour",
    "silver",
)
PYTHON = '''"""About {name}: {sentence}"""


class Box:
    def put(self, thing: str) -> None:
        """Put a thing named {name} into the box and close it again."""
        self.thing = thing


def {name}_without(first: int, second: int) -> int:
    total = first + second
    return total * 2
'''


def sentence(number: int, words: int = 30) -> str:
    return "A " + " ".join(f"{WORDS[(number + i) % 12]}{number}" for i in range(words)) + "."


def read(path: Path, seed: int = 0) -> list[Prompt]:
    return list(read_prompts([path], seed))


def write_lines(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Forty files of source and forty of prose."""
    for number in range(40):
        source = PYTHON.format(name=f"thing_{number}", sentence=sentence(number))
        (tmp_path / f"{number}.py").write_text(source)
        paragraphs = "\n\n".join(sentence(1000 + 5 * number + i) for i in range(5))
        (tmp_path / f"{number}{('.md', '.rst', '.txt')[number % 3]}").write_text(paragraphs)
    return tmp_path


def test_source_gives_functions_up_to_the_end_of_their_docstring(library: Path) -> None:
    found = [p.text for p in read(library) if "def put" in p.text]
    assert len(found) == 40
    for text in found:
        start = text.index("def put")
        assert text[start:].startswith('def put(self, thing: str) -> None:\n    """Put a thing')
        assert text.endswith('close it again."""\n')


@pytest.mark.parametrize("suffix", [".md", ".rst", ".txt"])
def test_prose_gives_questions_and_beginnings(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a{suffix}").write_text("\n\n".join(map(sentence, range(60))))
    found = read(tmp_path)
    texts = [p.text for p in found if p.text]
    assert sum(bool(p.said) for p in found) >= 60
    assert 5 <= len(texts) < 40
    assert all(any(sentence(n).startswith(text) for n in range(60)) for text in texts)
    assert all(SHORT <= len(p.text or p.said) <= LONG for p in found)


def test_lines_of_json(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Is water wet?"}]
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "once upon", "other": 1},
        {"text": "a time"},
        {"messages": messages},
        {"prompt_token_ids": [5, 6, 7], "prompt": "not this"},
    )
    assert set(read(path)) == {
        Prompt(text="once upon"),
        Prompt(text="a time"),
        Prompt(said="Is water wet?"),
        Prompt(ids=(5, 6, 7)),
    }


def test_what_a_server_recorded(tmp_path: Path) -> None:
    """With characters that end a line for some, and not for JSON."""
    line = to_line(recorded(pb.GenerationParams(text="a\u2028b\x85"), plain_sample()))
    (tmp_path / "a.jsonl").write_bytes(line * 2 + b"\n")
    assert read(tmp_path) == [Prompt(ids=(1, 2**32 - 1))]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"7",
        b"{}",
        b'{"prompt": 7}',
        b'{"messages": []}',
        b'{"messages": [{"role": "user"}]}',
        b'{"prompt_token_ids": ["5"]}',
        b'{"prompt_token_ids": [true]}',
        b'{"prompt_token_ids": [-1]}',
        b'{"text": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: no prompt: "):
        read(path)


@pytest.mark.parametrize(
    "source",
    [
        b"def f(:\n    '''What a function that is not one says about itself.'''\n",
        b"\x00def f(): pass\n",
        b"# -*- coding: latin-1 -*-\ndef f():\n    '''F\xfcnfzehn W\xf6rter oder mehr, hier.'''\n",
        b"x = " + b"(" * 5000,
        b"x = " + b"-" * 100_000 + b"1\n",
        b"",
        b"\xff\xfe",
    ],
)
def test_what_is_not_python_is_passed_over(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "a.py").write_bytes(source)
    assert read(tmp_path) == []


def test_what_the_parser_warns_of_makes_no_noise(tmp_path: Path) -> None:
    """Warnings are errors here."""
    source = (
        '\ufeffx = "\\d" if 1 is 1 else 1or 1\n\x0c\ndef f(text):\n    "Looks for \\d in a text."\n'
    )
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    assert any(
        p.text.endswith('def f(text):\n    "Looks for \\d in a text."\n') for p in read(tmp_path)
    )


def test_lines_are_counted_as_the_parser_does(tmp_path: Path) -> None:
    odd = 'x = """\x0c \x1c \u2028 \x85"""\n\n\n'
    source = odd + 'def g(value):\n    """Gives the value back as it came."""\n'
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    texts = [p.text for p in read(tmp_path) if p.text]
    assert [t[t.index("def") :] for t in texts] == [source[source.index("def") :]]


def test_the_seed_decides_the_order(library: Path) -> None:
    first = read(library, 1)
    assert first == read(library, 1)
    assert len(first) > 200
    assert set(first) != set(read(library, 2))  # other questions
    assert len(set(first)) == len(first)


def test_a_file_named_twice_counts_once(library: Path) -> None:
    path = library / "3.py"
    assert files_of([library, path]) == files_of([library])
    assert list(read_prompts([path, path], 0)) == list(read_prompts([path], 0))


def test_texts_and_chats_come_in_turn(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MIXED", 5)
    first = read(library)[:60]
    assert sum(bool(p.said) for p in first) == 30


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that have been opened so far."""
    opened: list[Path] = []
    inner = prompts._of_file

    def noted(path: Path, draw: object) -> Iterator[Prompt]:
        opened.append(path)
        return inner(path, draw)  # type: ignore[arg-type]

    monkeypatch.setattr(prompts, "_of_file", noted)
    return opened


def test_files_are_read_as_they_are_needed(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MIXED", 5)
    opened = counting(monkeypatch)
    assert len(list(islice(read_prompts([library], 0), 10))) == 10
    assert 0 < len(opened) < 40


def test_of_one_kind_not_all_are_read_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_WAITING", 10)
    opened = counting(monkeypatch)
    for number in range(20):
        items = ({"prompt_token_ids": [number, i]} for i in range(5))
        write_lines(tmp_path / f"{number}.jsonl", *items)
    source = read_prompts([tmp_path], 0)
    next(source)
    assert len(opened) == 3
    assert len(list(source)) == 99


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^no \.py, .* in "):
        read(tmp_path)
    with pytest.raises(ValueError, match="absent is neither a folder nor one of"):
        read(tmp_path / "absent")
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"a\.csv is neither a folder nor one of \.py"):
        read(tmp_path / "a.csv")
    (tmp_path / "a.txt").touch()
    assert read(tmp_path) == []
