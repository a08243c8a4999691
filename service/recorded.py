"""A recorded generation and the line of JSON that it is in a file. Written by `service.recording`,
read by `draftwire replay`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from service.pb import draftwire_pb2 as pb

VERSION = 1

M = TypeVar("M", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """What was produced of a sample, delivered or not. `finish_reason` is a name of the wire
    without its prefix; `matched` the stop string or stop token id that ended it."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    matched: str | int | None
    usage: pb.Usage
    speculation: pb.SpeculationStats


@dataclass(frozen=True, slots=True)
class RecordedGeneration:
    """One generation, all of its samples. `time` is that of its acceptance: ISO 8601, UTC.

    `params` are the client's, with the seed that was used; nobody may change them.
    """

    time: str
    generation: str
    tenant: str
    model: str
    fingerprint: str
    strict: bool
    params: pb.GenerationParams
    prompt_token_ids: tuple[int, ...]
    samples: tuple[RecordedSample, ...]


def to_line(recorded: RecordedGeneration) -> bytes:
    """One line of UTF-8 with its end. Every number and every text is read back as it was."""
    whole = {
        "version": VERSION,
        "time": recorded.time,
        "generation": recorded.generation,
        "tenant": recorded.tenant,
        "model": recorded.model,
        "fingerprint": recorded.fingerprint,
        "strict": recorded.strict,
        "params": MessageToDict(recorded.params, preserving_proto_field_name=True),
        "prompt_token_ids": recorded.prompt_token_ids,
        "samples": [_sample(sample) for sample in recorded.samples],
    }
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def from_line(line: bytes) -> RecordedGeneration:
    """Raises ValueError that says what is wrong with it."""
    try:
        data = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    version = _of(data, "version", int)
    if version != VERSION:
        raise ValueError(f"version {version} is not one that is known ({VERSION})")
    params = _message(data, "params", pb.GenerationParams)
    samples = tuple(_read_sample(entry) for entry in _of(data, "samples", list))
    count = max(1, params.n)
    if len(samples) != count or any(sample.index != i for i, sample in enumerate(samples)):
        raise ValueError("samples: must be as many as params.n says, with the indices 0, 1, ...")
    return RecordedGeneration(
        time=_of(data, "time", str),
        generation=_of(data, "generation", str),
        tenant=_of(data, "tenant", str),
        model=_of(data, "model", str),
        fingerprint=_of(data, "fingerprint", str),
        strict=_of(data, "strict", bool),
        params=params,
        prompt_token_ids=_ids(data, "prompt_token_ids"),
        samples=samples,
    )


def _sample(sample: RecordedSample) -> dict[str, Any]:
    return {
        "index": sample.index,
        "token_ids": sample.token_ids,
        "text": sample.text,
        "finish_reason": sample.finish_reason,
        "matched": sample.matched,
        "usage": plain(sample.usage),
        "speculation": plain(sample.speculation),
    }


def plain(message: Message) -> dict[str, Any]:
    """A message under its proto names, zeros included, for who does not know it."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _read_sample(data: Any) -> RecordedSample:
    matched = data.get("matched") if isinstance(data, dict) else None
    if matched is not None and type(matched) not in (str, int):
        raise ValueError("matched: must be a string, a token id or null")
    return RecordedSample(
        index=_of(data, "index", int),
        token_ids=_ids(data, "token_ids"),
        text=_of(data, "text", str),
        finish_reason=_of(data, "finish_reason", str),
        matched=matched,
        usage=_message(data, "usage", pb.Usage),
        speculation=_message(data, "speculation", pb.SpeculationStats),
    )


def _of(data: Any, name: str, kind: type[T]) -> T:
    if not isinstance(data, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004 - the caller expects ValueError
    value = data.get(name)
    if type(value) is not kind:  # True is no int here
        raise ValueError(f"{name}: must be a {kind.__name__}")
    if isinstance(value, str):
        value.encode()  # JSON can hold half a character, Unicode cannot: a ValueError
    return value


def _ids(data: Any, name: str) -> tuple[int, ...]:
    ids = _of(data, name, list)
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{name}: must be token ids")
    return tuple(ids)


def _message(data: Any, name: str, make: Callable[[], M]) -> M:
    try:
        return ParseDict(_of(data, name, dict), make())
    except ParseError as error:
        raise ValueError(f"{name}: {error}") from error
