"""The options of `draftwire generate` as a request: what was not given is not sent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from service.pb import draftwire_pb2 as pb

M = TypeVar("M", bound=Message)
PATH = re.compile(r"(\.{0,2}/|~)\S*|\S+\.(json|lark|txt)")


def build_params(
    *,
    prompt: str,
    chat: bool,
    n: int | None = None,
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
    forced_text: str | None = None,
    seed: int | None = None,
    stop: Iterable[str] = (),
    include_stop: bool = False,
    ignore_eos: bool = False,
    min_tokens: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    echo: bool = False,
    text_offsets: bool = False,
    priority: str | None = None,
    timeout: float | None = None,
    no_speculation: bool = False,
    max_draft_tokens: int | None = None,
    draft_sources: Iterable[str] = (),
    json_schema: str | None = None,
    regex: str | None = None,
    choices: Iterable[str] = (),
    grammar: str | None = None,
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
        output=_unless_empty(
            pb.Output(
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                echo=echo,
                text_offsets=text_offsets,
            )
        ),
        speculation=_unless_empty(
            pb.Speculation(
                off=no_speculation, max_draft_tokens=max_draft_tokens, sources=draft_sources
            )
        ),
        priority=None if priority is None else f"PRIORITY_{priority.upper()}",
        timeout=None if timeout is None else _duration(timeout),
        forced_text=forced_text,
        n=n,
        grammar=_grammar(json_schema, regex, tuple(choices), grammar),
    )
    if chat:
        message = pb.ChatMessage(role="user", content=prompt)
        params.messages.CopyFrom(pb.ChatMessages(messages=[message]))
    else:
        params.text = prompt
    return params


def _grammar(
    json_schema: str | None, regex: str | None, choices: tuple[str, ...], lark: str | None
) -> pb.Grammar | None:
    choice = pb.Choice(options=choices) if choices else None
    given = {"json_schema": json_schema, "regex": regex, "choice": choice, "lark": lark}
    fields = {name: value for name, value in given.items() if value is not None}
    if len(fields) > 1:
        raise ValueError("--json-schema, --regex, --choice and --grammar exclude one another")
    return pb.Grammar(**fields) if fields else None  # type: ignore[arg-type]


def text_or_file(given: str | None) -> str | None:
    """The content of the file if it names one, else the text itself. Raises ValueError for a file
    that cannot be read, or that is not there: a text does not look like a path."""
    if given is None:
        return None
    try:
        is_file = Path(given).is_file()
    except (OSError, ValueError):  # too long for a name, or not one
        is_file = False
    if not is_file and PATH.fullmatch(given):
        raise ValueError(f"there is no file {given}")
    if not is_file:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(str(error)) from error


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
