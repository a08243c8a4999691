"""Draftwire itself: a server on loopback, with real clients over the wire."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from loadtest.client import OPTIONS, Record, Stream
from loadtest.peers.contender import Broken, Job, Outcome
from loadtest.peers.group import Group, log_file
from loadtest.report import summarise
from service.pb import draftwire_pb2 as pb
from service.pb import draftwire_pb2_grpc as pb_grpc

CONNECTIONS = 4
INFO_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that is SERVING: where, what it says of its model, and its processes."""

    target: str
    info: pb.GetModelInfoResponse
    group: Group


class OwnServer:
    """A contender: `draftwire serve` with `arguments`. `logs` is a directory for its log."""

    def __init__(
        self, name: str, arguments: Sequence[str], logs: Path, patience: float = 600.0
    ) -> None:
        self.name = name
        self._arguments = list(arguments)
        self._log = log_file(logs, name)
        self._patience = patience
        self._group: Group | None = None
        self._target = ""

    def serve(self) -> Serving:
        """Start it, and leave it running. Raises Broken."""
        with tempfile.TemporaryDirectory() as folder:
            port_file = Path(folder) / "port"
            listen = ["--listen", "127.0.0.1:0", "--port-file", str(port_file)]
            command = [sys.executable, "-m", "service", "serve", *listen, *self._arguments]
            self._group = Group(command, {}, self._log)
            self._target = self._until_serving(self._group, port_file)
        return Serving(self._target, _model_info(self._target), self._group)

    def start(self) -> dict[str, str]:
        serving = self.serve()
        serving.group.pause()
        return {
            "arguments": " ".join(self._arguments),
            "dtype": serving.info.dtype,
            "drafts": ",".join(serving.info.draft_sources),
            "fingerprint": serving.info.fingerprint,
        }

    def run(self, job: Job) -> Outcome:
        assert self._group is not None, "start comes first"
        with self._group.awake():
            records, seconds = asyncio.run(waves(self._target, job))
        if bad := [record.error for record in records if record.error]:
            raise Broken(f"{len(bad)} requests failed: {bad[0]}\n{self._group.last_words()}")
        return Outcome(seconds, tuple(map(delivered, records)), details(records, job))

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _until_serving(self, group: Group, port_file: Path) -> str:
        end = time.monotonic() + self._patience
        while not group.ended and time.monotonic() < end:
            if port_file.exists():
                target = port_file.read_text(encoding="utf-8").strip()
                probe = ["-m", "service.cli.health", "--target", target, "--wait", "2"]
                if subprocess.run([sys.executable, *probe], check=False).returncode == 0:
                    return target
            time.sleep(POLL_S)
        raise Broken(f"it does not serve\n{group.last_words()}")


async def waves(target: str, job: Job) -> tuple[list[Record], float]:
    """Do `job`; the records in the order of its prompts, and the seconds it took."""
    streams = [Stream(target, time.perf_counter) for _ in range(min(CONNECTIONS, job.at_once))]
    records: list[Record] = []
    try:
        for wave in job.waves:
            calls = (
                streams[i % len(streams)].generate(f"{len(records) + i}", _params(ids, job))
                for i, ids in enumerate(wave)
            )
            records += await asyncio.gather(*calls)
    finally:
        for stream in streams:
            await stream.close()
    return records, max(r.ended for r in records) - min(r.started for r in records)


def delivered(record: Record) -> int:
    """Tokens that arrived; -1 if the server counted otherwise."""
    arrived = sum(tokens for _, tokens in record.deltas)
    assert record.finished is not None
    return arrived if arrived == record.finished.usage.completion_tokens else -1


def details(records: Sequence[Record], job: Job) -> dict[str, float]:
    """What the wire tells beyond the time."""
    report = summarise(records, workload="", concurrency=job.at_once, requests=len(records))
    known = {
        "ttft_p50_s": report.ttft_s["p50"],
        "itl_p50_s": report.itl_s["p50"],
        "tokens_per_step": report.tokens_per_target_step,
    }
    return {name: value for name, value in known.items() if value is not None}


def _params(ids: Sequence[int], job: Job) -> pb.GenerationParams:
    return pb.GenerationParams(
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.Sampling(temperature=0.0),
        stopping=pb.Stopping(max_tokens=job.max_tokens, ignore_eos=True),
    )


def _model_info(target: str) -> pb.GetModelInfoResponse:
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        stub = pb_grpc.ModelServiceStub(channel)
        info: pb.GetModelInfoResponse = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=INFO_S)
        return info
