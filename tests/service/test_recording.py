"""`serve --record`: what is written is what was asked for and what was produced."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from engine.outcome import FinishReason
from service import app
from service.generation import Sample
from service.pb import draftwire_pb2 as pb
from service.recording import NoRecordings
from tests.service.fakes import text_of
from tests.service.harness import Harness, params_of, running
from tests.service.hashed import Hashed, hashing, ids_of
from tests.service.recordings import recorded_in
from tests.service.test_app import scripted, settings


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
