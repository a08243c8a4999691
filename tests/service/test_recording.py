"""`serve --record`: what is written is what was asked for and produced, and nobody waits for it."""

from __future__ import annotations

import asyncio
import io
import json
import stat
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.metrics import NoOpMeter

from engine.outcome import FinishReason
from service import app
from service.generation import Sample
from service.harmless import Harmless
from service.logs import make_log
from service.metrics import RecordingMetrics
from service.pb import draftwire_pb2 as pb
from service.recorded import RecordedGeneration, RecordedSample, from_line, to_line
from service.recording import NoRecordings
from service.recording_writer import Drop, Job, Losses, Writer
from tests.service.fakes import TIMEOUT_S, eventually, text_of
from tests.service.harness import Harness, params_of, running
from tests.service.hashed import Hashed, hashing, ids_of
from tests.service.recordings import recorded_in
from tests.service.test_app import scripted, settings
from tests.service.test_telemetry import total

# ---- the form ----------------------------------------------------------------------------------

numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ids = st.lists(st.integers(0, 2**31), max_size=4)
uint64 = st.integers(0, 2**64 - 1)
samplings = st.builds(
    pb.Sampling,
    temperature=st.none() | numbers,
    top_k=st.none() | st.integers(-(2**31), 2**31 - 1),
    top_p=st.none() | numbers,
    seed=st.none() | uint64,
    logit_bias=st.dictionaries(st.integers(-(2**63), 2**63 - 1), numbers, max_size=3),
    allowed_token_ids=st.none() | st.builds(pb.TokenIds, ids=ids),
    banned_token_ids=ids,
    bad_words=st.lists(texts, max_size=2),
)
stoppings = st.builds(
    pb.Stopping,
    max_tokens=st.none() | st.integers(0, 2**31 - 1),
    stop_token_ids=ids,
    stop=st.lists(texts, max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 9),
)
nanos = st.integers(0, 999_999_999)
prompts = st.one_of(
    st.builds(lambda text: {"text": text}, texts),
    st.builds(lambda ids: {"token_ids": pb.TokenIds(ids=ids)}, ids),
    st.builds(
        lambda pairs: {
            "messages": pb.ChatMessages(
                messages=[pb.ChatMessage(role=r, content=c) for r, c in pairs]
            )
        },
        st.lists(st.tuples(texts, texts), max_size=2),
    ),
)
rest = st.fixed_dictionaries(
    {
        "sampling": st.none() | samplings,
        "stopping": st.none() | stoppings,
        "speculation": st.none()
        | st.builds(pb.Speculation, off=st.booleans(), sources=st.lists(texts, max_size=2)),
        "priority": st.sampled_from([0, 1, 2, 3]),
        "timeout": st.none() | st.builds(Duration, seconds=st.integers(0, 10**11), nanos=nanos),
        "cache_salt": texts,
        "forced_text": texts,
        "output": st.none() | st.builds(pb.Output, logprobs=st.none() | st.integers(0, 20)),
        "grammar": st.none() | st.builds(pb.Grammar, regex=texts),
    }
)
requests = st.builds(lambda prompt, rest: pb.GenerationParams(**prompt, **rest), prompts, rest)
samples = st.builds(
    RecordedSample,
    index=st.just(0),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    text=texts,
    finish_reason=st.sampled_from(["STOP", "ERROR"]),
    matched=st.none() | texts | st.integers(0, 2**32 - 1),
    usage=st.builds(pb.Usage, prompt_tokens=st.integers(0, 2**32 - 1)),
    speculation=st.builds(
        pb.SpeculationStats,
        by_source=st.dictionaries(texts, st.builds(pb.SourceStats, drafted=st.just(3)), max_size=2),
    ),
)


def recorded(params: pb.GenerationParams, *samples: RecordedSample) -> RecordedGeneration:
    return RecordedGeneration(
        *("2026-01-02T03:04:05.678901+00:00", "g-1", "tenant\u2028", "m", "f00d", True, params),
        prompt_token_ids=(1, 2**32 - 1),
        samples=samples,
    )


@given(requests, samples)
def test_every_field_survives(params: pb.GenerationParams, sample: RecordedSample) -> None:
    written = recorded(params, sample)
    line = to_line(written)
    assert line.count(b"\n") == 1
    read = from_line(line)
    assert read == written
    # Equality of messages takes -0.0 for 0.0; their bytes do not.
    assert read.params.SerializeToString(deterministic=True) == params.SerializeToString(
        deterministic=True
    )


def plain_sample(index: int = 0) -> RecordedSample:
    return RecordedSample(index, (1,), "a", "EOS", None, pb.Usage(), pb.SpeculationStats())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version 2"),
        ({"version": True}, "version"),
        ({"strict": 1}, "strict"),
        ({"tenant": None}, "tenant"),
        ({"text": "x"}, ""),
        ({"params": {"tempreature": 1}}, "params"),
        ({"params": {"sampling": {"seed": str(2**64)}}}, "params"),
        ({"params": {"text": "x", "n": 2}}, "samples"),
        ({"prompt_token_ids": [1, "2"]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"samples": []}, "samples"),
        ({"samples": ["x"]}, "object"),
        ({"generation": "\ud800"}, "surrogates"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(change: dict[str, Any], named: str) -> None:
    data = json.loads(to_line(recorded(params_of(), plain_sample()))) | change
    if not named:
        from_line(json.dumps(data).encode())  # more than is known does no harm at the top
        return
    with pytest.raises(ValueError, match=named):
        from_line(json.dumps(data).encode())


@pytest.mark.parametrize("line", [b"", b"{", b"[]\n", b"\xff\n", b"1\n", b"[" * 100_000])
def test_what_is_no_record_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        from_line(line)


# ---- through a server, with the real engine ----------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("method", ["Session", "Generate", "Complete"])
async def test_a_record_is_what_the_client_asked_for_and_got(
    model_dir: Path, tmp_path: Path, method: str, n: int
) -> None:
    params = ids_of(1, 2, 3, n=n, max_tokens=30, stop=["gag", "bb"])
    async with hashing(model_dir, record=tmp_path / "records", trust_tenant=True) as served:
        got, seed = await _output(served, method, params)
        await served.stop()
    (record,) = recorded_in(tmp_path / "records")
    assert [(s.token_ids, s.text, s.finish_reason) for s in record.samples] == got
    assert any(token_ids for token_ids, _, _ in got)
    assert record.params.sampling.seed == seed
    record.params.ClearField("sampling")
    assert record.params == params
    assert record.prompt_token_ids == (1, 2, 3)
    assert (record.tenant, record.model, record.fingerprint) == ("default", "scripted", "f00d")
    assert record.strict
    assert datetime.fromisoformat(record.time).utcoffset() == timedelta(0)
    first, *others = record.samples
    assert first.usage.prompt_tokens == 3
    assert not any(sample.usage.prompt_tokens for sample in others)
    for sample in record.samples:
        assert sample.usage.completion_tokens == len(sample.token_ids)
        assert sample.speculation.target_steps > 0


async def _output(
    served: Hashed, method: str, params: pb.GenerationParams
) -> tuple[list[tuple[tuple[int, ...], str, str]], int]:
    """By sample what a client gets; and the seed of the first."""
    if method == "Complete":
        whole = await served.generations.Complete(pb.CompleteRequest(params=params))
        answers = [whole, *whole.samples]
        return [_of(a.token_ids, a.text, a.finished) for a in answers], whole.seed
    if method == "Generate":
        events = [e async for e in served.generations.Generate(pb.GenerateRequest(params=params))]
    else:
        session = served.session()
        await session.send(generation_id="a", start=params)
        await session.call.done_writing()
        await session.done()
        events = session._events
    deltas = [e.delta for e in events if e.HasField("delta")]
    ends = sorted((e.finished for e in events if e.HasField("finished")), key=lambda f: f.index)
    parts = [[d for d in deltas if d.index == end.index] for end in ends]
    got = [
        _of([i for d in own for i in d.token_ids], "".join(d.text for d in own), end)
        for own, end in zip(parts, ends, strict=True)
    ]
    return got, events[0].accepted.seed


def _of(token_ids: Any, text: str, end: pb.Finished) -> tuple[tuple[int, ...], str, str]:
    return tuple(token_ids), text, pb.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_")


# ---- endings -----------------------------------------------------------------------------------

End = Callable[[Harness, Any, str], Any]


async def _cancel(served: Harness, session: Any, name: str) -> None:
    await session.cancel("a")
    await session.event("finished")


async def _hang_up(served: Harness, session: Any, name: str) -> None:
    session.call.cancel()
    await served.engine.freed()


async def _expire(served: Harness, session: Any, name: str) -> None:
    served.engine.clock = lambda: time.monotonic() + 3600
    served.engine.step()


async def _die(served: Harness, session: Any, name: str) -> None:
    served.engine.die()


async def _drain(served: Harness, session: Any, name: str) -> None:
    await served.stop(0.05)


def _end(reason: FinishReason, **more: Any) -> End:
    async def end(served: Harness, session: Any, name: str) -> None:
        served.engine.end(name, reason, **more)

    return end


@pytest.mark.parametrize(
    ("end", "reason", "matched"),
    [
        (_cancel, "CANCELLED", None),
        (_hang_up, "CANCELLED", None),
        (_expire, "DEADLINE", None),
        (_die, "ERROR", None),
        (_drain, "DRAINED", None),
        (_end(FinishReason.EOS), "EOS", None),
        (_end(FinishReason.CONTEXT), "CONTEXT", None),
        (_end(FinishReason.STALLED), "STALLED", None),
        (_end(FinishReason.STOP, matched="END"), "STOP", "END"),
        (_end(FinishReason.STOP, matched=7), "STOP", 7),
        (_end(FinishReason.ERROR, error="broken"), "ERROR", None),
    ],
)
@pytest.mark.parametrize("produced", [0, 3])
async def test_every_ending_with_what_was_produced(
    model_dir: Path, tmp_path: Path, end: End, reason: str, matched: str | int | None, produced: int
) -> None:
    async with running(model_dir, record=tmp_path) as served:
        session = await served.session()
        timeout = Duration(seconds=1800) if end is _expire else None
        await session.start("a", timeout=timeout, max_tokens=50)
        await session.event("accepted")
        (request,) = await served.engine.submitted()
        if produced:
            served.engine.step(produced)
        if produced and end is not _hang_up:  # then nothing of it was read
            await session.event("delta")
        await end(served, session, request.id)
        if end is not _drain:
            await served.stop()
    (record,) = recorded_in(tmp_path)
    (sample,) = record.samples
    assert (sample.finish_reason, sample.matched) == (reason, matched)
    assert sample.token_ids == tuple(range(produced))
    assert sample.text == text_of(produced)
    assert sample.usage.completion_tokens == produced
    assert record.generation == request.id
    assert record.params.sampling.seed == request.sampling.seed


async def test_samples_end_one_by_one_and_are_one_record(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir, record=tmp_path) as served:
        session = await served.session()
        await session.start("a", n=3, max_tokens=4, seed=2**64 - 1)
        requests = await served.engine.submitted(3)
        served.engine.end(requests[1].id, FinishReason.EOS)
        served.engine.step(2)
        served.engine.end(requests[2].id, FinishReason.CANCELLED)
        assert recorded_in(tmp_path) == []
        served.engine.step(2)
        await served.stop()
    (record,) = recorded_in(tmp_path)
    assert [(s.index, len(s.token_ids), s.finish_reason) for s in record.samples] == [
        (0, 4, "LENGTH"),
        (1, 0, "EOS"),
        (2, 2, "CANCELLED"),
    ]
    assert record.params.sampling.seed == 2**64 - 1


async def test_what_is_refused_is_not_recorded(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir, record=tmp_path) as served:
        session = await served.session()
        await session.start("a", max_tokens=-1)
        await session.event("rejected")
        served.engine.before_submit = lambda _: served.engine._change(
            served.engine.state.RESTARTING, ""
        )
        await session.start("a", max_tokens=1)
        await session.event("rejected")
        await served.stop()
    assert recorded_in(tmp_path) == []


async def test_off_by_default_and_then_nothing_piles_up(
    served: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Sample] = []
    init = Sample.__init__

    def watched(self: Sample, *parts: Any) -> None:
        init(self, *parts)
        made.append(self)

    monkeypatch.setattr(Sample, "__init__", watched)
    session = await served.session()
    await session.start("a", max_tokens=3)
    await session.event("accepted")
    assert isinstance(made[0]._recording, NoRecordings)
    assert not any(thread.name == "recording" for thread in threading.enumerate())


async def test_tenants_have_folders_of_their_own(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir, record=tmp_path, trust_tenant=True) as served:
        for tenant in ("../../up", "A", "a"):
            session = await served.session(metadata=(("draftwire-tenant", tenant),))
            await session.start("a", text=tenant, max_tokens=1)
            await session.event("accepted")
            served.engine.step()
            await session.until_finished("a")
        await served.stop()
    found = {r.tenant: r.params.text for r in recorded_in(tmp_path)}
    assert found == {"../../up": "../../up", "A": "A", "a": "a"}
    check_modes(tmp_path)


def check_modes(root: Path) -> None:
    assert len(list(root.glob("*/*.jsonl"))) == 3
    for path in root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


# ---- nobody waits, nobody notices --------------------------------------------------------------


class StuckStore:
    """A disk that hangs until it is let go; knows what reached it."""

    def __init__(self, *_: Any) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()
        self.lines: list[bytes] = []

    def open(self) -> None:
        return None

    def append(self, tenant: str, line: bytes) -> bool:
        self.reached.set()
        assert self.go.wait(TIMEOUT_S)
        self.lines.append(line)
        return True

    def close(self) -> None:
        return None


class BrokenStore(StuckStore):
    def append(self, tenant: str, line: bytes) -> bool:
        raise OSError(28, "No space left on device")


async def _ten_generations(served: Harness) -> None:
    session = await served.session()
    for i in range(10):
        await session.start(f"g{i}", max_tokens=2)
        await session.event("accepted")
        served.engine.step(2)
        events = (await session.until_finished(f"g{i}"))[f"g{i}"]
        assert "".join(e.delta.text for e in events) == text_of(2)
        assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH


async def test_a_disk_that_hangs_costs_records_and_nothing_else(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StuckStore()
    monkeypatch.setattr("service.server.Segments", lambda *_: store)
    monkeypatch.setattr("service.server.MOST_FLUSH_S", 0.1)
    monkeypatch.setattr("service.server.LAST_WORDS_S", 0.1)
    monkeypatch.setattr("service.server.Writer", partial(Writer, most_waiting=3))
    async with running(model_dir, record=tmp_path) as served:
        await _ten_generations(served)
        assert store.reached.wait(TIMEOUT_S)
        # One is being written, three wait; the first may not have been taken up at once.
        full = total(served.reader, "draftwire.records.dropped")
        assert full in (6, 7)
        lines = [line for line in served.logged() if line["event"] == "records dropped"]
        assert len(lines) == 1
        assert lines[0]["queue_full"] == 1
        async with asyncio.timeout(TIMEOUT_S):
            await served.stop()
        store.go.set()


async def test_a_disk_that_fails_costs_records_and_nothing_else(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.server.Segments", BrokenStore)
    async with running(model_dir, record=tmp_path) as served:
        await _ten_generations(served)
        await eventually(
            lambda: (
                total(served.reader, "draftwire.records.dropped", draftwire__drop__reason="disk")
                == 10
            )
        )
        assert total(served.reader, "draftwire.records.written") == 0
        (line,) = [line for line in served.logged() if line["event"] == "records dropped"]
        assert "No space left" in line["error"]


async def test_what_is_written_is_counted(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir, record=tmp_path) as served:
        await _ten_generations(served)
        await eventually(lambda: total(served.reader, "draftwire.records.written") == 10)
        assert total(served.reader, "draftwire.records.dropped") == 0


class Harm:
    """Losses that are kept, over a clock that stands until it is moved."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        self.now = 0.0
        log = make_log("info", "json", self.out)
        self.metrics = RecordingMetrics(NoOpMeter("test"))
        self.harmless = Harmless(log, self.clock)
        self.losses = Losses(self.metrics, self.harmless, log, self.clock)

    def clock(self) -> float:
        return self.now

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.getvalue().splitlines()]

    def writer(self, store: Any, *limits: int) -> Writer:
        writer = Writer(store, self.losses, self.metrics, self.harmless, *limits)
        writer.start()
        return writer


def test_one_line_a_minute_says_how_many() -> None:
    harm = Harm()
    for now in (0.0, 1.0, 59.0, 60.0, 61.0):
        harm.now = now
        harm.losses.add(Drop.DISK if now != 59 else Drop.QUEUE_FULL, "broken")
    first, second = harm.lines()
    assert (first["disk"], first["error"]) == (1, "broken")
    assert (second["disk"], second["queue_full"]) == (2, 1)


def test_what_waits_is_bounded_in_bytes() -> None:
    harm, store = Harm(), StuckStore()
    writer = harm.writer(store, 100, 1000)
    for _ in range(3):
        writer.put(Job("t", 400, lambda: b"x"))
    assert [line["queue_full"] for line in harm.lines()] == [1]
    store.go.set()
    writer.close(TIMEOUT_S)
    assert store.lines == [b"x"] * 2
    writer.put(Job("t", 1, lambda: b"x"))  # after the end
    assert store.lines == [b"x"] * 2


def test_room_comes_back_when_it_is_written() -> None:
    harm, store = Harm(), StuckStore()
    store.go.set()
    writer = harm.writer(store, 1, 1000)
    for i in range(20):
        writer.put(Job("t", 1000, lambda: b"x"))
        while writer._bytes:
            threading.Event().wait(0.001)
        assert len(store.lines) == i + 1
    writer.close(TIMEOUT_S)
    assert harm.lines() == []


def test_closing_writes_what_waits_within_bounds() -> None:
    harm, store = Harm(), StuckStore()
    writer = harm.writer(store)
    for _ in range(5):
        writer.put(Job("t", 1, lambda: b"x"))
    assert store.reached.wait(TIMEOUT_S)
    writer.close(0.05)
    assert [line["stopped"] for line in harm.lines()] == [1]
    assert sum(harm.losses._untold.values()) == 3
    store.go.set()
    writer._thread.join(TIMEOUT_S)
    assert store.lines == [b"x"]


def test_a_record_that_cannot_be_made_does_not_end_the_others() -> None:
    harm, store = Harm(), StuckStore()
    store.go.set()
    writer = harm.writer(store)

    def fails() -> bytes:
        raise ZeroDivisionError

    writer.put(Job("t", 1, fails))
    writer.put(Job("t", 1, lambda: b"x"))
    writer.close(TIMEOUT_S)
    assert store.lines == [b"x"]
    assert [line["internal"] for line in harm.lines()] == [1]


# ---- where nothing can be written --------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "below"])
def test_a_folder_that_cannot_be_written_is_exit_code_2(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    root = file if where == "file" else file / "below"
    monkeypatch.setattr(app, "engine_factory", lambda settings: scripted(model_dir))
    assert app.run(settings(tmp_path, record=root)) == app.MISCONFIGURED
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert len(said) == 1
    assert said[0].startswith(f"draftwire: record: cannot record in {root}: ")


async def test_two_servers_do_not_share_a_folder(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir, record=tmp_path):
        with pytest.raises(app.ConfigError, match="another server"):
            async with running(model_dir, record=tmp_path):
                pass
    async with running(model_dir, record=tmp_path):  # it is free again
        pass


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_a_caller_that_leaves(model_dir: Path, tmp_path: Path, method: str) -> None:
    async with running(model_dir, record=tmp_path) as served:
        request = getattr(pb, f"{method}Request")(params=params_of(max_tokens=50))
        call = getattr(served.generations, method)(request)
        await served.engine.submitted()
        served.engine.step(7)
        call.cancel()
        await served.engine.freed()
        await served.stop()
    (record,) = recorded_in(tmp_path)
    assert record.samples[0].text == text_of(7)
    assert record.samples[0].finish_reason == "CANCELLED"
