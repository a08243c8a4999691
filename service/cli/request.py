"""The options of `draftwire generate` as a request: what was not given is not sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from service.pb import draftwire_pb2 as pb

M = TypeVar("M", bound=Message)


def build_params(
    *,
    prompt: str,
    chat: bool,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    bad_words: Iterable[str] = (),
    seed: int | None = None,
    stop: Iterable[str] = (),
    include_stop: bool = False,
    ignore_eos: bool = False,
    min_tokens: int | None = None,
    logprobs: int | None = None,
    priority: str | None = None,
    timeout: float | None = None,
    no_speculation: bool = False,
    max_draft_tokens: int | None = None,
    draft_sources: Iterable[str] = (),
) -> pb.GenerationParams:
    """The request; None and empty mean "not given".

    Whether the values make sense is for the server to say; ValueError or OverflowError only if
    one does not fit its field.
    """
    params = pb.GenerationParams(
        sampling=_unless_empty(
            pb.Sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                logit_bias=logit_bias,
                bad_words=bad_words,
                seed=seed,
            )
        ),
        stopping=_unless_empty(
            pb.Stopping(
                max_tokens=max_tokens,
                stop=stop,
                include_stop=include_stop,
                ignore_eos=ignore_eos,
                min_tokens=min_tokens,
            )
        ),
        output=None if logprobs is None else pb.Output(logprobs=logprobs),
        speculation=_unless_empty(
            pb.Speculation(
                off=no_speculation, max_draft_tokens=max_draft_tokens, sources=draft_sources
            )
        ),
        priority=None if priority is None else f"PRIORITY_{priority.upper()}",
        timeout=None if timeout is None else _duration(timeout),
    )
    if chat:
        message = pb.ChatMessage(role="user", content=prompt)
        params.messages.CopyFrom(pb.ChatMessages(messages=[message]))
    else:
        params.text = prompt
    return params


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _unless_empty(message: M) -> M | None:
    return message if message.ByteSize() else None


def parse_bias(entries: Iterable[str]) -> dict[int, float]:
    """`ID:VALUE` each. Raises ValueError."""
    bias: dict[int, float] = {}
    for entry in entries:
        token, _, value = entry.partition(":")
        try:
            bias[int(token)] = float(value)
        except ValueError as error:
            raise ValueError(f"{entry!r} is not ID:VALUE") from error
    return bias
