"""Files of records: the cap holds, tenants do not mix, and no name leads out of the folder."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.segments import LONGEST_NAME, NAME, Segments, folder_name

HOSTILE = [
    *("", ".", "..", "...", "/", "//", "/etc/passwd", "../../x", "a/b", "a%2fb", "%", "%%", "~"),
    *("a\\b", "C:\\x", "\x00", "\n", "a\nb", " ", "a ", "A", "a", "é", "e\u0301", "É", "ß", "SS"),
    *("\u017f", "s", "K", "\u212a", "\ud800", "x" * 5000, "x" * 5001, "é" * 3000, "é" * 3000 + "x"),
    *(".lock", "~" + "0" * 64, "con", "-", "_", "日本", "İ", "i", "\u0131", "ﬁ", "fi"),
    *("\x0c2\x088", "\x88"),
]


def segments(root: Path, most: int, now: float = 1e9) -> Segments:
    made = Segments(root, most, lambda: now)
    made.open()
    return made


def kept(root: Path, tenant: str) -> list[bytes]:
    """Lines of a tenant, oldest first."""
    files = sorted((root / folder_name(tenant)).glob("*.jsonl"), key=number)
    return [line for file in files for line in file.read_bytes().splitlines(keepends=True)]


def number(file: Path) -> int:
    match = NAME.fullmatch(file.name)
    assert match is not None
    return int(match[1])


tenants = st.sampled_from(["a", "A", "../a"])
sizes = st.integers(1, 40) | st.integers(1, 900)
ops = st.lists(st.tuples(tenants, sizes) | st.just(None), max_size=120)


@settings(deadline=None)
@given(ops, st.sampled_from([64, 400, 801]))
def test_the_newest_are_kept_within_the_cap(ops: list[Any], most: int) -> None:
    """None is a restart."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = segments(root, most)
        written: dict[str, list[bytes]] = {}
        for count, op in enumerate(ops):
            if op is None:
                store.close()
                store = segments(root, most, now=1e9 - count)  # a clock that goes back
                continue
            tenant, size = op
            line = f"{count:04}{tenant}".encode() + b"x" * size + b"\n"
            assert store.append(tenant, line) == (len(line) <= most)
            if len(line) <= most:
                written.setdefault(tenant, []).append(line)
            for name, lines in written.items():
                found = kept(root, name)
                total = sum(map(len, found))
                assert total <= most
                assert found == lines[len(lines) - len(found) :]
                if len(found) < len(lines):  # no more is deleted than has to be
                    assert total > most - max(most // 8, *map(len, lines))
            files = root.glob("*/*")
            assert all(f.stat().st_size <= most // 8 or _lines(f) == 1 for f in files)
        store.close()


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def test_a_cap_that_is_lowered_holds_at_once(tmp_path: Path) -> None:
    store = segments(tmp_path, 1000)
    for tenant in ("a", "b"):
        for i in range(10):
            store.append(tenant, b"%099d\n" % i)
    store.close()
    segments(tmp_path, 300).close()
    for tenant in ("a", "b"):
        assert kept(tmp_path, tenant) == [b"%099d\n" % i for i in (7, 8, 9)]


def test_a_restart_goes_on_with_the_last_segment_if_it_is_whole(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        store = segments(tmp_path, 1000)
        store.append("t", line)
        store.close()
    (file,) = tmp_path.glob("t/*")
    with file.open("ab") as half:
        half.write(b"half a li")
    store = segments(tmp_path, 1000)
    store.append("t", b"three\n")
    store.close()
    first, second = sorted(tmp_path.glob("t/*"), key=number)
    assert first.read_bytes() == b"one\ntwo\nhalf a li"
    assert second.read_bytes() == b"three\n"
    assert first.name == "20010909T014640Z-00000001.jsonl"


@pytest.mark.parametrize("tenant", HOSTILE)
def test_a_hostile_tenant_stays_inside(tmp_path: Path, tenant: str) -> None:
    root = tmp_path / "records"
    store = segments(root, 1000)
    assert store.append(tenant, b"x\n")
    store.close()
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert file.resolve().parent.parent == root.resolve()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_no_two_tenants_have_one_folder() -> None:
    assert len({folder_name(tenant).casefold() for tenant in HOSTILE}) == len(set(HOSTILE))


@settings(deadline=None)
@given(st.text(), st.text())
def test_names_are_safe_and_differ(one: str, other: str) -> None:
    name = folder_name(one)
    assert name == name.lower()
    assert name.isascii()
    assert not set(name) & set("/\\.:\0 ")
    assert 0 < len(name) <= LONGEST_NAME
    assert (name == folder_name(other)) == (one == other)


def test_what_somebody_deletes_is_no_loss(tmp_path: Path) -> None:
    store = segments(tmp_path, 1000)
    store.append("t", b"one\n")
    for file in tmp_path.glob("t/*"):
        file.unlink()
    assert store.append("t", b"two\n")
    (tmp_path / "t").joinpath("mine.txt").write_text("x" * 5000)
    for file in tmp_path.glob("t/*.jsonl"):
        file.unlink()
    (tmp_path / "t" / "mine.txt").rename(tmp_path / "mine.txt")
    (tmp_path / "t").rmdir()
    assert store.append("t", b"three\n")
    assert kept(tmp_path, "t") == [b"three\n"]
    store.close()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "notes.jsonl").write_text("x" * 5000)
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "20010909T014640Z-00000001.jsonl").write_text("x" * 500)
    store = segments(tmp_path, 100)
    for i in range(50):
        store.append("t", b"%09d\n" % i)
    store.close()
    assert (folder / "notes.jsonl").stat().st_size == 5000
    assert len(list((tmp_path / "lost+found").iterdir())) == 1
    assert sum(f.stat().st_size for f in folder.glob("2*")) == 100


def test_a_line_that_is_written_in_part_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = segments(tmp_path, 1000)
    store.append("t", b"one\n")
    write = os.write

    def in_part(file: int, data: bytes) -> int:
        if len(data) < 4:
            raise OSError(28, "No space left on device")
        return write(file, data[:2])

    monkeypatch.setattr(os, "write", in_part)
    with pytest.raises(OSError, match="No space"):
        store.append("t", b"two\n")
    monkeypatch.undo()
    store.append("t", b"three\n")
    assert kept(tmp_path, "t") == [b"one\n", b"three\n"]
    store.close()


def test_many_tenants_are_not_all_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.segments.KNOWN", 4)
    store = segments(tmp_path, 100)
    for round_ in range(3):
        for i in range(9):
            store.append(f"t{i}", b"%d\n" % round_)
    assert len(store._folders) == 4
    assert all(kept(tmp_path, f"t{i}") == [b"0\n", b"1\n", b"2\n"] for i in range(9))
    assert all(len(list(tmp_path.glob(f"t{i}/*"))) == 1 for i in range(9))
    store.close()


def test_a_link_in_the_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    root = tmp_path / "records"
    (root / "t").mkdir(parents=True)
    (root / "t" / "20010909T014640Z-00000001.jsonl").symlink_to(victim)
    store = segments(root, 1000)
    with pytest.raises(FileExistsError):  # in this very second only
        store.append("t", b"x\n")
    store.close()
    store = segments(root, 1000, now=2e9)
    assert store.append("t", b"x\n")
    store.close()
    assert victim.read_text() == "mine\n"
