"""`draftwire replay` as a process, against a server whose answers are known; and what it sends."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from engine.outcome import FinishReason
from service.cli.comparison import BY_ITSELF, difference, reruns
from service.cli.replay import _opened
from service.cli.session import Result
from service.pb import draftwire_pb2 as pb
from service.recorded import RecordedGeneration, RecordedSample, to_line
from tests.loadtest.fakes import FakeServer, Script, serve, status
from tests.service.hashed import Hashed, hashing, ids_of
from tests.service.recordings import plain_sample, recorded, recorded_in

PIPE = asyncio.subprocess.PIPE


async def replay(*arguments: str, stdin: bytes = b"") -> tuple[int, list[str], str]:
    """Exit status, lines of stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service", "replay", *arguments),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out.decode().splitlines(), err.decode()


async def record_some(model_dir: Path, root: Path) -> list[RecordedGeneration]:
    """Three generations, by each method; four samples in the last."""
    async with hashing(model_dir, record=root) as served:
        session = served.session()
        await session.send(generation_id="a", start=ids_of(1, 2, max_tokens=40, ignore_eos=True))
        await session.call.done_writing()
        await session.done()
        params = ids_of(3, max_tokens=20, stop=["ab"])
        assert [e async for e in served.generations.Generate(pb.GenerateRequest(params=params))]
        params = ids_of(4, 5, n=4, seed=2**64 - 2, max_tokens=30)
        params.timeout.seconds = 3600
        await served.generations.Complete(pb.CompleteRequest(params=params))
        await served.stop()
    return recorded_in(root)


def write(path: Path, *generations: RecordedGeneration) -> str:
    path.write_bytes(b"".join(map(to_line, generations)))
    return str(path)


async def test_what_was_recorded_is_what_comes(model_dir: Path, tmp_path: Path) -> None:
    found = await record_some(model_dir, tmp_path / "records")
    assert [len(record.samples) for record in found] == [1, 1, 4]
    (file,) = (tmp_path / "records").glob("default/*")
    async with hashing(model_dir) as served:
        code, out, err = await replay(str(file), "--target", served.target)
        assert (code, err) == (0, "")
        tokens = [sum(len(s.token_ids) for s in record.samples) for record in found]
        assert out[:3] == [
            f"line {i} {record.generation} agrees: {count} tokens"
            for i, (record, count) in enumerate(zip(found, tokens, strict=True), 1)
        ]
        assert out[3:] == ["agrees 3, differs 0, failed 0, skipped 0, malformed 0"]
        only = ("--id", found[1].generation, "--target", served.target, "--json")
        code, out, _ = await replay("-", *only, stdin=file.read_bytes())
        assert code == 0
        assert [json.loads(line) for line in out] == [
            {
                "line": 2,
                "outcome": "agrees",
                "generation": found[1].generation,
                "tokens": tokens[1],
                "because": "",
                "difference": None,
            },
            {"agrees": 1, "differs": 0, "failed": 0, "skipped": 0, "malformed": 0},
        ]


async def test_a_file_that_grows_is_read_as_far_as_it_was(model_dir: Path, tmp_path: Path) -> None:
    """As one does that the server records this very replay to."""
    await record_some(model_dir, tmp_path / "records")
    (file,) = (tmp_path / "records").glob("default/*")
    lines = file.read_bytes().splitlines(keepends=True)
    with _opened(str(file)) as found:
        seen = []
        for line in found:
            seen.append(line)
            with file.open("ab") as growing:
                growing.write(line)
    assert seen == lines


Change = Callable[[RecordedSample], RecordedSample]


def other_id(sample: RecordedSample) -> RecordedSample:
    ids = list(sample.token_ids)
    ids[3] += 100
    return replace(sample, token_ids=tuple(ids), text=sample.text[:3] + "?" + sample.text[4:])


CHANGES: list[tuple[Change, str, int]] = [
    (other_id, "id", 3),
    (lambda s: replace(s, token_ids=s.token_ids[:-1]), "id", -1),
    (lambda s: replace(s, token_ids=(*s.token_ids, 1)), "id", 0),
    (lambda s: replace(s, text="?" + s.text[1:]), "text", 0),
    (lambda s: replace(s, finish_reason="CONTEXT"), "finish reason", 0),
]


@pytest.mark.parametrize(("change", "what", "position"), CHANGES)
async def test_a_record_that_was_changed_differs_and_where(
    model_dir: Path, tmp_path: Path, change: Change, what: str, position: int
) -> None:
    good, _, several = await record_some(model_dir, tmp_path / "records")
    index = next(s.index for s in several.samples if len(s.token_ids) > 4)
    samples = list(several.samples)
    real = samples[index]
    samples[index] = change(real)
    if what != "text" and not (what == "id" and position == 3):
        position = len(real.token_ids) + position
    file = write(tmp_path / "changed", replace(several, samples=tuple(samples)), good)
    async with hashing(model_dir) as served:
        code, out, _ = await replay(file, "--target", served.target)
        assert code == 1
        unit = "character" if what == "text" else "token"
        assert f" differs: sample {index}, {unit} {position}: {what} " in out[0]
        if what == "id" and position == 3:
            now = real.token_ids[3]
            assert f"id {now + 100} recorded, {now} now (text '?" in out[0]
        assert " agrees: " in out[1]
        assert out[2].startswith("agrees 1, differs 1,")
        _, out, _ = await replay(file, "--target", served.target, "--json")
        found = json.loads(out[0])["difference"]
        assert (found["sample"], found["what"], found["position"]) == (index, what, position)


async def test_another_fingerprint_is_refused_and_can_be_forced(
    model_dir: Path, tmp_path: Path
) -> None:
    good, *_ = await record_some(model_dir, tmp_path / "records")
    file = write(tmp_path / "one", good)
    facts = {"fingerprint": "beef", "strict": False, "not_strict_because": "of fast layers"}
    async with hashing(model_dir, info=facts) as served:
        code, out, err = await replay(file, "--target", served.target)
        assert code == 1
        assert "failed: recorded with fingerprint f00d, the server has beef (--force" in out[0]
        assert err == "no bytes are promised: of fast layers\n"
        code, out, _ = await replay(file, "--target", served.target, "--force")
        assert (code, out[1]) == (0, "agrees 1, differs 0, failed 0, skipped 0, malformed 0")


async def test_what_was_cut_off_is_compared_as_far_as_it_went(
    model_dir: Path, tmp_path: Path
) -> None:
    async with hashing(model_dir, record=tmp_path / "records") as served:
        await _cut_off(served, ids_of(1, 2, n=3, max_tokens=900, ignore_eos=True, stop=["abc"]))
        first = served.client.cancels
        await _cut_off(served, ids_of(6, max_tokens=900, ignore_eos=True, min_tokens=500))
        assert served.client.cancels > first
        await served.stop()
    found = recorded_in(tmp_path / "records")
    assert {s.finish_reason for record in found for s in record.samples} >= {"CANCELLED"}
    count = sum(len(s.token_ids) for record in found for s in record.samples)
    assert count > 0
    empty = replace(plain_sample(), token_ids=(), text="", finish_reason="DRAINED")
    nothing = recorded(ids_of(1, 2), empty)
    file = write(tmp_path / "file", *found, nothing)
    async with hashing(model_dir, record=tmp_path / "again") as served:
        code, out, err = await replay(file, "--target", served.target)
        assert (code, err) == (0, ""), out
        assert out[2] == "line 3 g-1 skipped: ended with DRAINED before its first token"
        assert out[3] == "agrees 2, differs 0, failed 0, skipped 1, malformed 0"
        await served.stop()
    # No more was computed than was recorded.
    again = recorded_in(tmp_path / "again")
    assert sum(len(s.token_ids) for record in again for s in record.samples) == count


async def _cut_off(served: Hashed, params: pb.GenerationParams) -> None:
    """Cancelled after a few steps, in the middle of one."""
    served.gate.hold_after(6)
    session = served.session()
    await session.send(generation_id="a", start=params)
    await session.event("accepted")
    await asyncio.to_thread(served.gate.held.wait)
    before = served.client.cancels
    await session.cancel("a")
    while served.client.cancels == before:  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(0.002)
    served.gate.release()
    ended = 0
    while ended < max(1, params.n):
        ended += (await session.event()).HasField("finished")
    session.call.cancel()


async def test_lines_that_are_no_records_are_named(model_dir: Path, tmp_path: Path) -> None:
    good, other, _ = await record_some(model_dir, tmp_path / "records")
    lines = [to_line(good), b"{}\n", b"\n", to_line(other), to_line(good)[:-20]]
    file = tmp_path / "file"
    file.write_bytes(b"".join(lines))
    async with hashing(model_dir) as served:
        code, out, _ = await replay(str(file), "--target", served.target)
        assert code == 1
        assert [line.partition(":")[0] for line in out[:-1]] == [
            f"line 1 {good.generation} agrees",
            "line 2 malformed",
            f"line 4 {other.generation} agrees",
            "line 5 malformed",
        ]
        assert out[-1] == "agrees 2, differs 0, failed 0, skipped 0, malformed 2"
        only = ("--id", other.generation, "--target", served.target)
        code, out, _ = await replay(str(file), *only)
        assert (code, out[-1]) == (0, "agrees 1, differs 0, failed 0, skipped 0, malformed 2")
        code, out, err = await replay(str(file), "--target", served.target, "--id", "no-such")
        assert code == 2
        assert "there is no generation 'no-such'" in err


@pytest.mark.parametrize(
    "arguments", [("no/such/file",), (".",), (), ("a", "b"), ("-", "--frobnicate")]
)
async def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    code, out, err = await replay(*arguments)
    assert (code, out) == (2, [])
    assert "Traceback" not in err


async def test_an_empty_file_proves_nothing() -> None:
    async with serve(FakeServer()) as fake:
        code, out, err = await replay("-", "--target", fake.target)
        assert (code, out) == (2, [])
        assert "there are no records in -" in err
    code, _, err = await replay("-", "--target", fake.target)
    assert code == 1
    assert err.startswith("UNAVAILABLE: ")


@pytest.mark.parametrize(
    ("script", "because"),
    [
        (Script(reject=status("INVALID_ARGUMENT", "bad")), "INVALID_ARGUMENT: bad"),
        (Script(breaks=True), "UNAVAILABLE: going away"),
        (Script(reason=pb.FINISH_REASON_DRAINED), "sample 0: the server ended it with DRAINED"),
        (
            Script(reason=pb.FINISH_REASON_ERROR, error=status("INTERNAL", "broken")),
            "sample 0: INTERNAL: broken",
        ),
        (Script(), "sample 0: the prompt has 7 tokens, recorded were 2"),
    ],
)
async def test_what_fails_on_the_server(script: Script, because: str, tmp_path: Path) -> None:
    file = write(tmp_path / "file", recorded(pb.GenerationParams(text="x"), plain_sample()))
    async with serve(FakeServer(lambda _: script)) as fake:
        code, out, _ = await replay(file, "--target", fake.target, "--force")
    assert code == 1
    assert out == [
        f"line 1 g-1 failed: {because}",
        "agrees 0, differs 0, failed 1, skipped 0, malformed 0",
    ]


async def test_ctrl_c_hangs_up(tmp_path: Path) -> None:
    file = write(tmp_path / "file", recorded(pb.GenerationParams(text="x"), plain_sample()))
    async with asyncio.timeout(60), serve(FakeServer(lambda _: Script(hold=True))) as fake:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service", "replay", file, "--force", "--target", fake.target),
            stdout=PIPE,
            stderr=PIPE,
        )
        await fake.holding.acquire()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        await fake.dropped.wait()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


# ---- what is sent, and what counts as the same -------------------------------------------------


EARLY = [reason.value for reason in FinishReason if reason.value not in BY_ITSELF]


def sample(reason: str, count: int = 3, index: int = 0, text: str = "abc") -> RecordedSample:
    ids = tuple(range(1, count + 1))
    return replace(plain_sample(index), token_ids=ids, text=text, finish_reason=reason)


def params_of_a_chat(**fields: Any) -> pb.GenerationParams:
    return pb.GenerationParams(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")]),
        sampling=pb.Sampling(seed=2**64 - 1, temperature=0.5),
        stopping=pb.Stopping(max_tokens=9, stop=["x"]),
        priority=pb.PRIORITY_BATCH,
        **fields,
    )


def test_an_ordinary_end_is_run_as_it_was_but_for_time_and_unknown_sources() -> None:
    params = params_of_a_chat(
        n=2, timeout=Duration(seconds=1), speculation=pb.Speculation(sources=["model:x", "ngram"])
    )
    (rerun,) = reruns(recorded(params, sample("LENGTH"), sample("EOS", 2, 1)), ("ngram",))
    assert rerun.params == params_of_a_chat(n=2, speculation=pb.Speculation(sources=["ngram"]))
    assert len(rerun.samples) == 2
    assert params.HasField("timeout")  # the record's own is as it was


@pytest.mark.parametrize("reason", EARLY)
def test_an_early_end_is_run_up_to_there_sample_by_sample(reason: str) -> None:
    params = params_of_a_chat(n=4, timeout=Duration(seconds=1))
    params.stopping.min_tokens = 3
    ends = [sample(reason), sample("EOS", 5, 1), sample(reason, 0, 2), sample(reason, 2, 3)]
    first, second, last = reruns(recorded(params, *ends), ())
    assert [r.samples for r in (first, second, last)] == [(ends[0],), (ends[1],), (ends[3],)]
    for rerun in (first, second, last):
        assert not rerun.params.HasField("n")
        assert not rerun.params.HasField("timeout")
        assert rerun.params.priority == pb.PRIORITY_BATCH
    assert [r.params.sampling.seed for r in (first, second, last)] == [2**64 - 1, 0, 2]
    assert first.params.stopping == pb.Stopping(max_tokens=3, min_tokens=3, stop=["x"])
    assert second.params.stopping == params.stopping
    assert last.params.stopping == pb.Stopping(max_tokens=2, min_tokens=2)
    forced = params_of_a_chat(forced_text="a long text")
    (rerun,) = reruns(recorded(forced, sample(reason)), ())
    assert rerun.params == forced


def test_an_empty_output_that_ended_by_itself_is_compared() -> None:
    params = pb.GenerationParams(text="x", prefill_only=True)
    (rerun,) = reruns(recorded(params, sample("LENGTH", 0, text="")), ())
    assert rerun.params == params
    assert reruns(recorded(params, sample("CANCELLED", 0, text="")), ()) == []


@pytest.mark.parametrize(
    ("reason", "before", "now", "ended", "same"),
    [
        ("EOS", "abc", "abc", "EOS", True),
        ("EOS", "abc", "abcd", "EOS", False),
        ("EOS", "ab\ufffd", "abé", "EOS", False),
        ("CANCELLED", "abc", "abcd", "LENGTH", True),
        ("CANCELLED", "ab\ufffd", "abé", "LENGTH", True),  # the character is whole now
        ("CANCELLED", "abc", "abd", "LENGTH", False),
        ("CANCELLED", "abc", "ab", "LENGTH", False),
        ("CANCELLED", "abc", "ab", "STOP", True),  # "c" was held for a stop string
        ("ERROR", "", "abc", "LENGTH", True),  # what was held back was lost with the engine
    ],
)
def test_texts(reason: str, before: str, now: str, ended: str, same: bool) -> None:
    ids = [1, 2, 3] if reason == "EOS" else [1, 2, 3, 4]
    result = Result(0, [now], ids, finished=pb.Finished(reason=f"FINISH_REASON_{ended}"))
    assert (difference(sample(reason, text=before), result) is None) == same


def test_a_long_text_is_shortened() -> None:
    result = Result(0, ["a" * 50 + "b" * 90], [1, 2, 3], finished=pb.Finished(reason=2))
    found = difference(sample("EOS", text="a" * 50 + "c" * 10), result)
    assert str(found) == (f"sample 0, character 50: text '{'c' * 10}' recorded, '{'b' * 24}…' now")
