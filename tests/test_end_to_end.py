"""The whole of it: `draftwire serve` in a process, its engine in a child, the real client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from service.pb import draftwire_pb2 as pb
from service.pb.draftwire_pb2_grpc import GenerationServiceStub
from tests.engine.model_files import write_directory

START_S = 90.0
PROMPT = "for index in range(10):\n    print(index"


class Server:
    """A `draftwire serve` process of the test's own."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, model: Path) -> None:
        self.process = process
        self.address = address
        self.model = model
        self.engine_pid = 0

    def engine(self) -> psutil.Process:
        """The engine's process, once there is one."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            for child in psutil.Process(self.process.pid).children():
                if "engine.child" in child.cmdline():
                    return child
            time.sleep(0.02)
        raise AssertionError("no engine process")

    def generate(self, *options: str) -> dict[str, object]:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "service", "generate", PROMPT, "--json"),
                *("--wait", "60", "--target", self.address, *options),
            ],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, object] = json.loads(done.stdout)
        return result


@contextmanager
def serving(
    model: Path, scratch: Path, *options: str, stderr: int | None = None
) -> Iterator[Server]:
    port_file = scratch / "port"
    log = (scratch / "log").open("wb")
    command = [sys.executable, "-m", "service", "serve", "--model", str(model), *options]
    command += ["--listen", "127.0.0.1:0", "--port-file", str(port_file), "--kv-cache-mib", "8"]
    with log, subprocess.Popen(command, stdout=log, stderr=stderr or log) as process:
        try:
            end = time.monotonic() + START_S
            while not port_file.exists() and time.monotonic() < end and process.poll() is None:
                time.sleep(0.05)
            assert port_file.exists(), (scratch / "log").read_text()
            yield Server(process, port_file.read_text().strip(), model)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads of 16, which the kernels know: the same bytes are promised.
    return write_directory(tmp_path_factory.mktemp("model"), rows=300, hidden=64)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--dtype", "float32", "--draft", f"ngram,model:{model}", "--threads", "1")
    with serving(model, tmp_path_factory.mktemp("serve"), *options) as running:
        yield running


def test_greedy_is_what_transformers_says(server: Server) -> None:
    got = server.generate("--temperature", "0", "--max-tokens", "40", "--ignore-eos")
    stock = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    ids = torch.tensor([_encode(server)])
    with torch.inference_mode():
        want = stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
        )
    assert got["token_ids"] == want[0, ids.shape[1] :].tolist()
    assert got["finish_reason"] == "LENGTH"
    assert got["usage"] == {
        "prompt_tokens": ids.shape[1],
        "completion_tokens": 40,
        "cached_tokens": 0,
    }


async def test_samples_are_what_their_seeds_give_alone(server: Server) -> None:
    def request(seed: int, n: int | None) -> pb.CompleteRequest:
        return pb.CompleteRequest(
            params=pb.GenerationParams(
                text=PROMPT,
                n=n,
                sampling=pb.Sampling(seed=seed),
                stopping=pb.Stopping(max_tokens=30, ignore_eos=True),
                output=pb.Output(logprobs=3),
            )
        )

    server.generate("--max-tokens", "1")  # waits until it is serving
    async with grpc.aio.insecure_channel(server.address) as channel:
        complete = GenerationServiceStub(channel).Complete
        first = await complete(request(40, 4), timeout=60)
        samples = [first, *first.samples]
        for i, sample in enumerate(samples):
            alone = await complete(request(40 + i, None), timeout=60)
            assert sample.seed == alone.seed == 40 + i
            assert list(sample.token_ids) == list(alone.token_ids)
            assert sample.text == alone.text
            assert [entry.token_id for entry in sample.logprobs] == list(sample.token_ids)
            for entry, same in zip(sample.logprobs, alone.logprobs, strict=True):
                assert entry == same
    assert len({sample.text for sample in samples}) == 4


def test_samples_from_the_command_line(server: Server) -> None:
    options = ("--temperature", "0.9", "--seed", "40", "--max-tokens", "12", "--ignore-eos")
    got = server.generate(*options, "-n", "3")["samples"]
    assert isinstance(got, list)
    assert [sample["seed"] for sample in got] == [40, 41, 42]
    for sample in got:
        alone = server.generate(*options[:2], "--seed", str(sample["seed"]), *options[4:])
        assert alone["token_ids"] == sample["token_ids"]
        assert alone["text"] == sample["text"]


def test_prompt_and_offsets_from_the_command_line(server: Server) -> None:
    options = ("--temperature", "0.9", "--seed", "3", "--max-tokens", "30", "--ignore-eos")
    asked = ("--echo", "--prompt-logprobs", "1", "--text-offsets")
    plain = server.generate(*options, *asked, "--no-speculation")
    drafted = server.generate(*options, *asked, "--draft-source", "model")
    assert plain["prompt_text"] == PROMPT
    assert plain["prompt_token_ids"] == _encode(server)
    offsets = plain["text_offsets"]
    assert isinstance(offsets, list)
    assert len(offsets) == 30
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert 0 < offsets[-1] <= len(str(plain["text"]))
    for field in ("prompt_text", "prompt_token_ids", "prompt_logprobs", "text", "text_offsets"):
        assert drafted[field] == plain[field]


def test_drafts_change_the_number_of_steps_and_nothing_else(server: Server) -> None:
    options = ("--temperature", "0.8", "--seed", "11", "--max-tokens", "40", "--ignore-eos")
    plain = server.generate(*options, "--no-speculation")
    drafted = server.generate(*options, "--draft-source", "model")
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["text"] == drafted["text"]
    speculation = drafted["speculation"]
    assert isinstance(speculation, dict)
    # The draft is the target itself, so every draft is accepted.
    assert speculation["accepted"] == speculation["drafted"] > 0
    assert speculation["by_source"].keys() == {"model"}
    assert speculation["target_steps"] < 40


def test_a_killed_engine_ends_its_streams_and_comes_back(server: Server) -> None:
    before = server.generate("--temperature", "0", "--max-tokens", "20")
    for _ in range(2):
        finished, seconds = asyncio.run(_kill_under_load(server))
        assert seconds < 2.0
        for event in finished:
            assert event.reason == pb.FINISH_REASON_ERROR
            assert event.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        after = server.generate("--temperature", "0", "--max-tokens", "20")
        assert after["token_ids"] == before["token_ids"]


def test_what_is_recorded_is_replayed_also_what_a_killed_engine_left(
    model: Path, tmp_path: Path
) -> None:
    options = ("--dtype", "float32", "--draft", "ngram", "--threads", "1")
    with serving(model, tmp_path, *options, "--record", str(tmp_path / "records")) as running:
        for more in (["-n", "3"], ["--chat"], ["--stop", "e"], ["--forced-text", "x = {"]):
            running.generate("--temperature", "0.9", "--max-tokens", "30", *more)
        finished, _ = asyncio.run(_kill_under_load(running))
        assert {event.reason for event in finished} == {pb.FINISH_REASON_ERROR}
        running.generate("--max-tokens", "1")  # it is back
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
    (file,) = (tmp_path / "records").glob("default/*.jsonl")
    assert len(file.read_bytes().splitlines()) == 4 + 8 + 1
    (tmp_path / "port").unlink(missing_ok=True)
    with serving(model, tmp_path, "--dtype", "float32", "--draft", "none", "--threads", "1") as new:
        new.generate("--max-tokens", "1")
        done = subprocess.run(
            [sys.executable, "-m", "service", "replay", str(file), "--target", new.address],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    last = done.stdout.splitlines()[-1]
    assert last == "agrees 13, differs 0, failed 0, skipped 0, malformed 0", done.stdout
    assert (done.returncode, done.stderr) == (0, "")


def test_sigterm_lets_running_work_finish(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, "--threads", "1") as running:
        running.generate("--max-tokens", "1")
        finished = asyncio.run(_terminate_while_streaming(running))
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert running.process.wait(20) == 0
        assert not psutil.pid_exists(running.engine_pid)


def test_a_log_whose_reader_left_costs_lines_and_nothing_else(model: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with serving(model, tmp_path, "--threads", "1", stderr=writer) as running:
        os.close(writer)
        os.close(reader)
        got = running.generate("--max-tokens", "20", "--ignore-eos")
        assert len(got["token_ids"]) == 20  # type: ignore[arg-type]
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0


def test_sigterm_while_the_model_loads_stops_at_once(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as running:
        engine = running.engine()
        started = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert time.monotonic() - started < 5
        assert not engine.is_running()


async def _kill_under_load(server: Server) -> tuple[list[pb.Finished], float]:
    """Eight streams, the engine killed once all have begun: how they end, and how soon."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = GenerationServiceStub(channel)
        streams = [stub.Generate(pb.GenerateRequest(params=_long(seed))) for seed in range(8)]
        for stream in streams:
            assert (await stream.read()).HasField("accepted")
            assert (await stream.read()).HasField("delta")
        server.engine().send_signal(signal.SIGKILL)
        started = time.monotonic()
        finished = [await _end(stream) for stream in streams]
        return finished, time.monotonic() - started


async def _terminate_while_streaming(server: Server) -> pb.Finished:
    server.engine_pid = server.engine().pid
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = GenerationServiceStub(channel)
        stream = stub.Generate(pb.GenerateRequest(params=_long(0)))
        await stream.read()
        await stream.read()
        server.process.send_signal(signal.SIGTERM)
        return await _end(stream)


async def _end(stream: grpc.aio.UnaryStreamCall) -> pb.Finished:
    while (response := await stream.read()) is not grpc.aio.EOF:
        if response.HasField("finished"):
            finished: pb.Finished = response.finished
            return finished
    raise AssertionError("a stream ended without its terminal event")


def _long(seed: int) -> pb.GenerationParams:
    """As long as the tiny context allows."""
    params = pb.GenerationParams(text="def add", stopping=pb.Stopping(ignore_eos=True))
    params.stopping.max_tokens = 110
    params.sampling.seed = seed
    return params


def _encode(server: Server) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(server.model / "tokenizer.json")).encode(PROMPT).ids
    return ids
