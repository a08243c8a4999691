"""Contenders that are servers: llama.cpp's over HTTP, our own over the wire."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from loadtest.memory import OUTPUT, PROMPT, filling
from loadtest.peers.contender import Broken, Job, Missing
from loadtest.peers.llama_server import LlamaServer, LlamaSetup
from loadtest.peers.own_server import OwnServer, delivered, details, waves
from service.pb import draftwire_pb2 as pb
from tests.loadtest.fakes import FakeServer, Script, serve

FAKE = Path(__file__).with_name("fake_llama_server.py")
JOB = Job(((1, 2), (3,), (4,)), 2, 5)


def llama(tmp_path: Path, script: Path = FAKE, draft: bool = False) -> LlamaServer:
    binary = tmp_path / "llama-server"
    models = tuple(tmp_path / name for name in ("model.gguf", "draft.gguf")[: 1 + draft])
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    binary.chmod(0o755)
    for model in models:
        model.touch()
    env = {"FAKE_JOURNAL": str(tmp_path / "journal")}
    setup = LlamaSetup(
        str(binary), models, "get it", threads=2, slots=4, context=512, arguments=("--x",), env=env
    )
    return LlamaServer("llama-server", setup, tmp_path)


def test_llama_server_is_started_asked_and_ended(tmp_path: Path) -> None:
    server = llama(tmp_path)
    try:
        facts = server.start()
        outcome = server.run(JOB)
        odd = server.run(Job(((13,),), 1, 5))
    finally:
        server.close()
    assert facts["version"] == "version: 1"
    assert (outcome.counts, odd.counts) == ((5, 5, 5), (4,))
    assert outcome.details == {"drafted": 0, "accepted": 0, "tokens_per_step": 1.0}
    assert outcome.seconds > 0
    arguments, *bodies = map(json.loads, (tmp_path / "journal").read_text().splitlines())
    given = dict(itertools.pairwise(arguments))
    assert (given["--parallel"], given["--ctx-size"], given["--threads"]) == ("4", "2048", "2")
    assert "--x" in arguments
    assert "--spec-draft-model" not in arguments
    assert sorted(body["prompt"] for body in bodies[:2]) == [[1, 2], [3]]
    assert bodies[2]["prompt"] == [4]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in bodies)
    with pytest.raises(Broken):
        server.run(JOB)


def test_a_server_that_dies_at_once_is_broken(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('illegal instruction')")
    server = llama(tmp_path, broken)
    try:
        with pytest.raises(Broken, match="illegal instruction"):
            server.start()
    finally:
        server.close()


def test_llama_server_with_a_draft_model_tells_what_was_drafted(tmp_path: Path) -> None:
    server = llama(tmp_path, draft=True)
    try:
        facts = server.start()
        outcome = server.run(JOB)
    finally:
        server.close()
    assert facts["weights"] == "model.gguf, draft.gguf"
    assert outcome.details == {"drafted": 9, "accepted": 6, "tokens_per_step": 15 / 9}
    arguments = json.loads((tmp_path / "journal").read_text().splitlines()[0])
    given = dict(itertools.pairwise(arguments))
    assert given["--model"] == str(tmp_path / "model.gguf")
    assert given["--spec-draft-model"] == str(tmp_path / "draft.gguf")


@pytest.mark.parametrize("draft", [None, Path("no.gguf")])
def test_llama_server_without_a_model_file_is_missing(tmp_path: Path, draft: Path | None) -> None:
    there = tmp_path / "model.gguf"
    there.touch()
    for models in ((draft,), (there, draft)):
        setup = LlamaSetup(sys.executable, models, "get it", 2, 4, 512)
        with pytest.raises(Missing, match="get it"):
            LlamaServer("llama-server", setup, tmp_path).start()


async def test_waves_over_the_wire() -> None:
    async with serve(FakeServer()) as fake:
        records, seconds = await waves(fake.target, JOB)
    assert seconds > 0
    assert [delivered(record) for record in records] == [5, 5, 5]
    assert details(records, JOB)["tokens_per_step"] == 2.5
    first = fake.requests[0]
    assert list(first.token_ids.ids) in ([1, 2], [3])
    assert list(fake.requests[2].token_ids.ids) == [4]
    assert (first.stopping.max_tokens, first.stopping.ignore_eos) == (5, True)
    assert fake.most_live <= 2


async def test_tokens_that_were_counted_otherwise_are_a_miscount() -> None:
    async with serve(FakeServer(lambda _: Script(deltas=(("x", (1, 2)),)))) as fake:
        records, _ = await waves(fake.target, JOB)
    record = records[0]
    assert record.finished is not None
    record.finished.usage.MergeFrom(pb.Usage(completion_tokens=3))
    assert delivered(record) == -1


def test_our_own_server_that_cannot_start_is_broken(tmp_path: Path) -> None:
    server = OwnServer("own", ["--model", str(tmp_path / "nothing")], tmp_path, patience=60)
    try:
        with pytest.raises(Broken, match="does not serve"):
            server.start()
    finally:
        server.close()


def test_the_load_that_fills_the_pool_asks_for_more_than_it_holds() -> None:
    job = filling(5000, 100)
    assert len(job.prompts) * (PROMPT + OUTPUT) >= 1.5 * 5000
    assert {len(prompt) for prompt in job.prompts} == {PROMPT}
    assert job.at_once == len(job.prompts)
