"""What of a recorded generation is run again, and whether what comes is what was recorded."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile

from service.cli.errors import enum_name
from service.cli.session import Result
from service.pb import draftwire_pb2 as pb
from service.recorded import RecordedGeneration, RecordedSample

# The output ended by what is in the request; any other end came from outside.
BY_ITSELF = frozenset({"STOP", "EOS", "LENGTH", "CONTEXT"})
SEEDS = 1 << 64
SHOWN = 24  # characters of a text from its first difference on
UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True)
class Rerun:
    """A request, and the recorded samples that its samples are compared with."""

    params: pb.GenerationParams
    samples: tuple[RecordedSample, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first one. `position` is that of a token, for texts that of a character."""

    sample: int
    what: str
    position: int
    recorded: int | str | None
    replayed: int | str | None
    recorded_text: str = ""
    replayed_text: str = ""

    def __str__(self) -> str:
        where = "character" if self.what == "text" else "token"
        said = f"sample {self.sample}, {where} {self.position}: {self.what} "
        said += f"{_shown(self.recorded)} recorded, {_shown(self.replayed)} now"
        if self.recorded_text != self.replayed_text:
            said += f" (text {self.recorded_text!r} recorded, {self.replayed_text!r} now)"
        return said


def reruns(recorded: RecordedGeneration, sources: Collection[str]) -> list[Rerun]:
    """The generation as it was asked for; or, if something from outside ended a sample, each
    sample as a request of its own, those that were ended up to where they were.

    Neither time limits nor draft sources change what is compared: there are none of the first,
    and only those of the second that are among `sources`. Empty if there is nothing to compare.
    """
    params = pb.GenerationParams()
    params.CopyFrom(recorded.params)
    params.ClearField("timeout")
    kept = [name for name in params.speculation.sources if name in sources]
    if kept != list(params.speculation.sources):
        params.speculation.sources[:] = kept
    if all(sample.finish_reason in BY_ITSELF for sample in recorded.samples):
        return [Rerun(params, recorded.samples)]
    return [
        Rerun(_alone(params, sample), (sample,))
        for sample in recorded.samples
        if sample.token_ids or sample.finish_reason in BY_ITSELF
    ]


def _alone(whole: pb.GenerationParams, sample: RecordedSample) -> pb.GenerationParams:
    params = pb.GenerationParams()
    params.CopyFrom(whole)
    params.ClearField("n")
    params.sampling.seed = (whole.sampling.seed + sample.index) % SEEDS
    # A forced text has to fit as a whole, so its output may go on beyond what was recorded.
    if sample.finish_reason not in BY_ITSELF and not params.forced_text:
        count = len(sample.token_ids)
        params.stopping.max_tokens = count
        if params.stopping.min_tokens > count:
            params.stopping.min_tokens = count
            params.stopping.ClearField("stop")  # they were not looked for yet
    return params


def difference(recorded: RecordedSample, result: Result) -> Difference | None:
    """The first one between a sample and what came now; None if they agree."""
    prefix = recorded.finish_reason not in BY_ITSELF
    before, now = list(recorded.token_ids), result.token_ids
    if prefix:
        now = now[: len(before)]
    if before != now:
        at = _common(before, now)
        start = _common(recorded.text, result.text)
        return Difference(
            recorded.index,
            "id",
            at,
            before[at] if at < len(before) else None,
            now[at] if at < len(now) else None,
            _cut(recorded.text, start),
            _cut(result.text, start),
        )
    reason = finish_reason(result)
    if not _same_text(recorded.text, result.text, prefix, reason):
        at = _common(recorded.text, result.text)
        texts = _cut(recorded.text, at), _cut(result.text, at)
        return Difference(recorded.index, "text", at, *texts)
    if not prefix and reason != recorded.finish_reason:
        return Difference(recorded.index, "finish reason", len(now), recorded.finish_reason, reason)
    return None


def finish_reason(result: Result) -> str:
    """By its name on the wire without the prefix; empty without an end."""
    if result.finished is None:
        return ""
    return enum_name(pb.FinishReason, result.finished.reason).removeprefix("FINISH_REASON_")


def _same_text(recorded: str, replayed: str, prefix: bool, reason: str) -> bool:
    if not prefix or recorded == replayed:
        return recorded == replayed
    recorded = recorded.rstrip(UNFINISHED)  # the character may have been finished now
    if replayed.startswith(recorded):
        return True
    # What was held back for a stop string came at the early end; now the string is complete.
    return reason == "STOP" and recorded.startswith(replayed)


def _common(one: Seq[object], other: Seq[object]) -> int:
    """How many of the first items are equal."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _cut(text: str, start: int) -> str:
    rest = text[start : start + SHOWN]
    return rest + "…" if start + SHOWN < len(text) else rest


def _shown(value: int | str | None) -> str:
    return "nothing" if value is None else repr(value)
