"""Protobuf to engine types. Every INVALID_ARGUMENT of a generation is decided here.

Two passes: `parse` checks all that can be said before tokenizing and reports every violation at
once; `Parsed.request` checks that the tokenized prompt and the output fit. Unset optional fields
mean the defaults written in the proto file, never zero by accident.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.request import (
    ForcedText,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
)
from engine.types import ModelInfo
from service.checks import Chat, Limits, Violations, check_ids, check_messages, check_text
from service.grammars import parse_grammar
from service.pb import draftwire_pb2 as pb
from service.sampling import parse_bad_words, parse_sampling

DEFAULT_MAX_TOKENS = 256
MAX_STOP_IDS = 1024
MAX_LOGPROBS = 20
MAX_SAMPLES = 16
MAX_SOURCES = 32
MAX_SALT = 256
MAX_TIMEOUT_S = 315_576_000_000
NANOS = 1_000_000_000

CLASSES = {
    pb.PRIORITY_UNSPECIFIED: 1,
    pb.PRIORITY_INTERACTIVE: 0,
    pb.PRIORITY_STANDARD: 1,
    pb.PRIORITY_BATCH: 2,
}

Prompt = str | Chat | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request whose fields are sound, before its prompt is tokenized."""

    root: str
    prompt: Prompt
    prompt_field: str
    sampling: SamplingParams
    stopping: StopParams
    max_tokens: int | None
    speculation: SpeculationParams
    priority: int
    timeout_s: float | None
    prefill_only: bool
    cache_salt: str
    seeded: bool
    bad_words: tuple[str, ...]
    output: OutputParams
    forced_text: str
    samples: int
    grammar_field: str
    grammar: GrammarParams | None
    echo: bool

    forced: ForcedText | None = None

    def with_bad_words(self, words: tuple[tuple[int, ...], ...]) -> Parsed:
        """The same with bad words as tokens."""
        logits = replace(self.sampling.logits, bad_words=words)
        return replace(self, sampling=replace(self.sampling, logits=logits))

    def request(
        self, request_id: str, prompt: tuple[int, ...], info: ModelInfo, arrived: float, tenant: str
    ) -> Request:
        """The engine's request. Refuses what can never fit the context or the KV pool."""
        max_tokens = self._fitting(prompt, info)
        return Request(
            id=request_id,
            prompt=prompt,
            stopping=replace(self.stopping, max_tokens=max_tokens),
            sampling=self.sampling,
            speculation=self.speculation,
            output=self.output,
            forced=self.forced,
            grammar=self.grammar,
            tenant=tenant,
            cache_salt=self.cache_salt,
            priority=self.priority,
            arrived=arrived,
            deadline=None if self.timeout_s is None else arrived + self.timeout_s,
        )

    @property
    def _forced_tokens(self) -> int:
        return 0 if self.forced is None else len(self.forced.tokens) + bool(self.forced.rest)

    def _fitting(self, prompt: tuple[int, ...], info: ModelInfo) -> int:
        """max_tokens, by default what is left of the smaller of context and pool."""
        found = Violations(self.root)
        room = min(info.context_limit, info.kv_capacity_tokens) - len(prompt)
        if found.need(len(prompt) > 0, self.prompt_field, "must not be empty"):
            need_room = 0 if self.prefill_only else 1
            if found.need(
                room >= need_room,
                self.prompt_field,
                f"{len(prompt)} tokens do not fit {_capacity(info, len(prompt) + need_room)}",
            ):
                wanted = self.max_tokens or 0
                found.need(
                    wanted <= room,
                    "stopping.max_tokens",
                    f"{len(prompt)} prompt tokens + {wanted} do not fit "
                    f"{_capacity(info, len(prompt) + wanted)}",
                )
                least = self.stopping.min_tokens
                forced = self._forced_tokens
                most = room if self.max_tokens is None and not self.prefill_only else wanted
                found.need(
                    forced <= most, "forced_text", f"{forced} tokens are more than the most, {most}"
                )
                found.need(
                    least <= most, "stopping.min_tokens", f"{least} are more than the most, {most}"
                )
        found.refuse_if_any()
        if self.prefill_only:
            return 0
        default = max(DEFAULT_MAX_TOKENS, self.stopping.min_tokens) + self._forced_tokens
        return min(default, room) if self.max_tokens is None else self.max_tokens


def _capacity(info: ModelInfo, needed: int) -> str:
    if needed > info.context_limit:
        return f"the context limit of {info.context_limit} tokens"
    return f"the KV capacity of {info.kv_capacity_tokens} tokens"


def parse(
    params: pb.GenerationParams, root: str, info: ModelInfo, limits: Limits, chat: bool, seed: int
) -> Parsed:
    """Check everything but the length of the tokenized prompt.

    `root` is the path of `params` in the client's message, `chat` whether the model has a chat
    template, `seed` the one used if the request brings none.
    """
    found = Violations(root)
    prompt_field, prompt = _prompt(params, info, limits, chat, found)
    grammar_field, grammar = parse_grammar(params, info, found)
    parsed = Parsed(
        root=root,
        prompt=prompt,
        prompt_field=prompt_field,
        sampling=parse_sampling(params.sampling, seed, info, found),
        stopping=_stopping(params, info, limits, found),
        max_tokens=_max_tokens(params, found),
        speculation=_speculation(params.speculation, info, found),
        priority=_priority(params.priority, found),
        timeout_s=_timeout(params, found),
        prefill_only=params.prefill_only,
        cache_salt=_cache_salt(params.cache_salt, found),
        seeded=params.sampling.HasField("seed"),
        bad_words=parse_bad_words(params.sampling, found),
        output=_output(params, found),
        forced_text=_forced_text(params, limits, found),
        samples=_samples(params, found),
        grammar_field=grammar_field,
        grammar=grammar,
        echo=params.output.echo,
    )
    found.refuse_if_any()
    return parsed


def _prompt(
    params: pb.GenerationParams, info: ModelInfo, limits: Limits, chat: bool, found: Violations
) -> tuple[str, Prompt]:
    match params.WhichOneof("prompt"):
        case "text":
            check_text(params.text, "text", limits, found)
            return "text", params.text
        case "token_ids":
            ids = params.token_ids.ids
            if found.need(len(ids) > 0, "token_ids.ids", "must not be empty") and found.need(
                len(ids) <= info.context_limit,
                "token_ids.ids",
                f"{len(ids)} tokens do not fit the context limit of {info.context_limit} tokens",
            ):
                check_ids(ids, "token_ids.ids", info, found)
            return "token_ids.ids", tuple(ids) if not found.found else ()
        case "messages":
            return "messages", check_messages(params.messages, limits, chat, found)
        case _:
            found.need(False, "prompt", "one of text, token_ids and messages is required")
            return "prompt", ""


def _max_tokens(params: pb.GenerationParams, found: Violations) -> int | None:
    field = "stopping.max_tokens"
    if not params.stopping.HasField("max_tokens"):
        return None
    max_tokens = params.stopping.max_tokens
    if params.prefill_only:
        found.need(max_tokens == 0, field, f"must be 0 with prefill_only, got {max_tokens}")
    else:
        found.need(max_tokens > 0, field, f"must be > 0, got {max_tokens}")
    return max_tokens


def _stopping(
    params: pb.GenerationParams, info: ModelInfo, limits: Limits, found: Violations
) -> StopParams:
    """Everything but max_tokens, which depends on the prompt."""
    stopping = params.stopping
    found.need(
        len(stopping.stop) <= limits.max_stop_strings,
        "stopping.stop",
        f"{len(stopping.stop)} stop strings are over the limit of {limits.max_stop_strings}",
    )
    for index, text in enumerate(stopping.stop[: limits.max_stop_strings]):
        field = f"stopping.stop[{index}]"
        found.need(len(text) > 0, field, "must not be empty")
        found.need(
            len(text) <= limits.max_stop_length,
            field,
            f"{len(text)} characters are over the limit of {limits.max_stop_length}",
        )
    ids = stopping.stop_token_ids
    if found.need(
        len(ids) <= MAX_STOP_IDS,
        "stopping.stop_token_ids",
        f"{len(ids)} ids are over the limit of {MAX_STOP_IDS}",
    ):
        check_ids(ids, "stopping.stop_token_ids", info, found)
    least = stopping.min_tokens
    found.need(least >= 0, "stopping.min_tokens", f"must be >= 0, got {least}")
    # What a grammar has brought to its end ends, also where the model may not end it before.
    endless = stopping.ignore_eos and not params.HasField("grammar")
    return StopParams(
        max_tokens=0,
        stop_ids=frozenset(ids[:MAX_STOP_IDS]),
        eos_ids=frozenset() if endless else frozenset(info.eos_ids),
        strings=tuple(stopping.stop[: limits.max_stop_strings]),
        min_tokens=least,
    )


def _samples(params: pb.GenerationParams, found: Violations) -> int:
    count = params.n if params.HasField("n") else 1
    if found.need(1 <= count <= MAX_SAMPLES, "n", f"must be in [1, {MAX_SAMPLES}], got {count}"):
        found.need(count == 1 or not params.prefill_only, "n", "must be 1 with prefill_only")
    return count


def _output(params: pb.GenerationParams, found: Violations) -> OutputParams:
    output = params.output
    counts: dict[str, int | None] = {}
    for name in ("logprobs", "prompt_logprobs"):
        count = counts[name] = getattr(output, name) if output.HasField(name) else None
        found.need(
            count is None or 0 <= count <= MAX_LOGPROBS,
            f"output.{name}",
            f"must be in [0, {MAX_LOGPROBS}], got {count}",
        )
    found.need(
        counts["logprobs"] is not None or not output.processed_logprobs,
        "output.processed_logprobs",
        "means nothing without output.logprobs",
    )
    return OutputParams(
        include_stop=params.stopping.include_stop,
        keep_special_tokens=output.keep_special_tokens,
        processed_logprobs=output.processed_logprobs,
        text_offsets=output.text_offsets,
        **counts,
    )


def _speculation(
    speculation: pb.Speculation, info: ModelInfo, found: Violations
) -> SpeculationParams:
    most: int | None = None
    if speculation.HasField("max_draft_tokens"):
        most = speculation.max_draft_tokens
        found.need(most >= 0, "speculation.max_draft_tokens", f"must be >= 0, got {most}")
        most = min(most, info.max_draft_tokens)
    known = ", ".join(info.draft_sources) or "none"
    sources = speculation.sources
    if found.need(len(sources) <= MAX_SOURCES, "speculation.sources", "too many names"):
        for index, name in enumerate(sources):
            found.need(
                name in info.draft_sources,
                f"speculation.sources[{index}]",
                f"unknown draft source {name[:40]!r}; this server has: {known}",
            )
    return SpeculationParams(0 if speculation.off else most, frozenset(sources[:MAX_SOURCES]))


def _forced_text(params: pb.GenerationParams, limits: Limits, found: Violations) -> str:
    text = params.forced_text
    if text:
        found.need(not params.prefill_only, "forced_text", "must be empty with prefill_only")
        check_text(text, "forced_text", limits, found)
    return text


def _priority(priority: pb.Priority, found: Violations) -> int:
    found.need(priority in CLASSES, "priority", f"unknown value {int(priority)}")
    return CLASSES.get(priority, 1)


def _cache_salt(salt: str, found: Violations) -> str:
    found.need(
        len(salt) <= MAX_SALT,
        "cache_salt",
        f"{len(salt)} characters are over the limit of {MAX_SALT}",
    )
    return salt


def _timeout(params: pb.GenerationParams, found: Violations) -> float | None:
    if not params.HasField("timeout"):
        return None
    timeout = params.timeout
    # In integers: a float cannot tell a nanosecond beside the longest duration.
    nanos = timeout.seconds * NANOS + timeout.nanos
    found.need(
        0 < nanos <= MAX_TIMEOUT_S * NANOS and 0 <= timeout.nanos < NANOS,
        "timeout",
        f"must be a valid duration > 0, got {timeout.seconds} s and {timeout.nanos} ns",
    )
    return nanos / NANOS
