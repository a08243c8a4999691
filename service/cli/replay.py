"""`draftwire replay`: recorded generations once more, and whether the bytes are the same."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO, Annotated, Any

import grpc
import typer

from service.cli import session
from service.cli.channel import connect
from service.cli.comparison import (
    BY_ITSELF,
    Difference,
    Rerun,
    difference,
    finish_reason,
    reruns,
)
from service.cli.errors import describe, from_rpc_error
from service.pb import draftwire_pb2 as pb
from service.pb.draftwire_pb2_grpc import ModelServiceStub
from service.recorded import RecordedGeneration, from_line

AGREES, DIFFERS, FAILED, SKIPPED, MALFORMED = OUTCOMES = (
    "agrees",
    "differs",
    "failed",
    "skipped",
    "malformed",
)
WRONG_USAGE = 2
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a line of the file. `because` says why, but for what agrees."""

    line: int
    outcome: str
    generation: str = ""
    tokens: int = 0
    because: str = ""
    difference: Difference | None = None

    def __str__(self) -> str:
        of = f" {self.generation}" if self.generation else ""
        about = f"{self.tokens} tokens" if self.outcome == AGREES else self.because
        return f"line {self.line}{of} {self.outcome}: {about}"


@dataclass(slots=True)
class Told:
    """Prints verdicts as they come, and counts them."""

    as_json: bool
    counts: Counter[str] = field(default_factory=Counter)

    def verdict(self, verdict: Verdict) -> None:
        self.counts[verdict.outcome] += 1
        print(json.dumps(asdict(verdict)) if self.as_json else str(verdict), flush=True)

    def end(self) -> None:
        totals = {outcome: self.counts[outcome] for outcome in OUTCOMES}
        line = ", ".join(f"{outcome} {count}" for outcome, count in totals.items())
        print(json.dumps(totals) if self.as_json else line, flush=True)


def replay(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file of `serve --record`; `-` reads stdin.")
    ],
    generation: Annotated[
        str | None, typer.Option("--id", metavar="GENERATION", help="Only this one.")
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the server listens.")
    ] = "127.0.0.1:50051",
    force: Annotated[
        bool, typer.Option("--force", help="Also where the server's fingerprint is another one.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, an object a line, the counts last.")
    ] = False,
) -> None:
    """Run recorded generations again, one by one, and compare ids, text and finish reason.

    What was ended early (cancelled, by a deadline) is compared as far as it went. Exit status:
    0 all agree, 1 some differ, failed or cannot be read, 2 wrong usage, 130 interrupted.
    """
    told = Told(as_json)
    try:
        with _opened(file) as lines:
            reached = asyncio.run(_replay(lines, generation, target, force, told))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if not reached:
        raise typer.Exit(1)
    found = sum(count for outcome, count in told.counts.items() if outcome != MALFORMED)
    if not found and (generation is not None or not told.counts[MALFORMED]):
        what = "are no records" if generation is None else f"is no generation {generation!r}"
        print(f"there {what} in {file}", file=sys.stderr)
        raise typer.Exit(WRONG_USAGE)
    told.end()
    bad = (DIFFERS, FAILED) if generation is not None else (DIFFERS, FAILED, MALFORMED)
    raise typer.Exit(int(any(told.counts[outcome] for outcome in bad)))


@contextmanager
def _opened(file: str) -> Iterator[Iterable[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        lines = open(file, "rb")  # noqa: SIM115 - closed below; only its errors are caught here
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    with lines:
        yield _as_of_now(lines)


def _as_of_now(lines: IO[bytes]) -> Iterator[bytes]:
    """Those that are there: a server that still writes to the file may record this very replay."""
    left = os.fstat(lines.fileno()).st_size
    for line in lines:
        if (left := left - len(line)) < 0:
            return
        yield line


async def _replay(
    lines: Iterable[bytes], generation: str | None, target: str, force: bool, told: Told
) -> bool:
    """False if the server cannot be asked what it serves."""
    async with connect(target) as channel:
        try:
            info = await ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        except grpc.aio.AioRpcError as error:
            print(describe(from_rpc_error(error)), file=sys.stderr)
            return False
        if not info.strict:
            print(f"no bytes are promised: {info.not_strict_because}", file=sys.stderr)
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                recorded = from_line(line)
            except ValueError as error:
                told.verdict(Verdict(number, MALFORMED, because=_one_line(str(error))))
                continue
            if generation is None or recorded.generation == generation:
                outcome = await _judged(channel, recorded, info, force)
                told.verdict(Verdict(number, generation=recorded.generation, **outcome))
    return True


async def _judged(
    channel: grpc.aio.Channel,
    recorded: RecordedGeneration,
    info: pb.GetModelInfoResponse,
    force: bool,
) -> dict[str, Any]:
    """Fields of its verdict."""
    if recorded.fingerprint != info.fingerprint and not force:
        because = f"recorded with fingerprint {recorded.fingerprint}, the server has "
        because += f"{info.fingerprint} (--force compares all the same)"
        return {"outcome": FAILED, "because": because}
    again = reruns(recorded, info.draft_sources)
    if not again:
        reason = recorded.samples[0].finish_reason
        return {"outcome": SKIPPED, "because": f"ended with {reason} before its first token"}
    for rerun in again:
        if (other := await _compared(channel, recorded, rerun)) is not None:
            return other
    tokens = sum(len(sample.token_ids) for rerun in again for sample in rerun.samples)
    return {"outcome": AGREES, "tokens": tokens}


async def _compared(
    channel: grpc.aio.Channel, recorded: RecordedGeneration, rerun: Rerun
) -> dict[str, Any] | None:
    """None if its samples agree."""
    try:
        results = await session.run(channel, rerun.params, lambda _: None, asyncio.Event())
    except session.Rejected as rejected:
        return {"outcome": FAILED, "because": _one_line(describe(rejected.status))}
    except grpc.aio.AioRpcError as error:
        return {"outcome": FAILED, "because": _one_line(describe(from_rpc_error(error)))}
    for sample, result in zip(rerun.samples, results, strict=True):
        if (failure := _failure(recorded, result)) is not None:
            return {"outcome": FAILED, "because": f"sample {sample.index}: {failure}"}
        if (found := difference(sample, result)) is not None:
            return {"outcome": DIFFERS, "because": str(found), "difference": found}
    return None


def _failure(recorded: RecordedGeneration, result: session.Result) -> str | None:
    """Why there is nothing to compare."""
    if result.finished is None:
        return "the stream ended before the generation did"
    if result.finished.HasField("error"):
        return _one_line(describe(result.finished.error))
    if (reason := finish_reason(result)) not in BY_ITSELF:
        return f"the server ended it with {reason}"
    was = len(recorded.prompt_token_ids)
    now = was if result.accepted is None else result.accepted.prompt_tokens
    return None if was == now else f"the prompt has {now} tokens, recorded were {was}"


def _one_line(text: str) -> str:
    return "; ".join(part.strip() for part in text.splitlines())
