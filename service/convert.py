"""Protobuf to engine types. Every INVALID_ARGUMENT of a generation is decided here.

Two passes: `parse` checks all that can be said before tokenizing and reports every violation at
once; `Parsed.request` checks that the tokenized prompt and the output fit. Unset optional fields
mean the defaults written in the proto file, never zero by accident.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from engine.types import (
    ForcedText,
    GrammarParams,
    LogitParams,
    ModelInfo,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
)
from service.checks import Chat, Limits, Violations, check_ids, check_messages, check_text
from service.grammars import parse_grammar
from service.pb import draftwire_pb2 as pb

DEFAULT_MAX_TOKENS = 256
# The noise of sampling cannot change an order of logits at a temperature below this: it is 0.
LEAST_TEMPERATURE = 1e-6
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD = 256
MAX_LOGPROBS = 20
MAX_SAMPLES = 16
MOST_REPETITION, MOST_PENALTY, MOST_BIAS = 10.0, 2.0, 100.0
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
        sampling=_sampling(params.sampling, seed, info, found),
        stopping=_stopping(params, info, limits, found),
        max_tokens=_max_tokens(params, found),
        speculation=_speculation(params.speculation, info, found),
        priority=_priority(params.priority, found),
        timeout_s=_timeout(params, found),
        prefill_only=params.prefill_only,
        cache_salt=_cache_salt(params.cache_salt, found),
        seeded=params.sampling.HasField("seed"),
        bad_words=_bad_words(params.sampling, found),
        output=_output(params, found),
        forced_text=_forced_text(params, limits, found),
        samples=_samples(params, found),
        grammar_field=grammar_field,
        grammar=grammar,
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


def _sampling(
    sampling: pb.Sampling, seed: int, info: ModelInfo, found: Violations
) -> SamplingParams:
    default = SamplingParams()
    temperature = sampling.temperature if sampling.HasField("temperature") else default.temperature
    top_k = sampling.top_k if sampling.HasField("top_k") else default.top_k
    top_p = sampling.top_p if sampling.HasField("top_p") else default.top_p
    min_p = sampling.min_p if sampling.HasField("min_p") else default.min_p
    found.need(
        math.isfinite(temperature) and temperature >= 0,
        "sampling.temperature",
        f"must be finite and >= 0, got {temperature}",
    )
    found.need(top_k >= 0, "sampling.top_k", f"must be >= 0, got {top_k}")
    # Written so that NaN fails.
    found.need(0 < top_p <= 1, "sampling.top_p", f"must be in (0, 1], got {top_p}")
    found.need(0 <= min_p <= 1, "sampling.min_p", f"must be in [0, 1], got {min_p}")
    return SamplingParams(
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=sampling.seed if sampling.HasField("seed") else seed,
        logits=_logits(sampling, info, found),
    )


def _logits(sampling: pb.Sampling, info: ModelInfo, found: Violations) -> LogitParams:
    """Everything but bad words, which are yet to be tokenized."""
    default = LogitParams()
    repetition, typical = default.repetition_penalty, default.typical_p
    if sampling.HasField("repetition_penalty"):
        repetition = sampling.repetition_penalty
    if sampling.HasField("typical_p"):
        typical = sampling.typical_p
    # Written so that NaN fails.
    found.need(
        0 < repetition <= MOST_REPETITION,
        "sampling.repetition_penalty",
        f"must be in (0, {MOST_REPETITION:g}], got {repetition}",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        found.need(
            -MOST_PENALTY <= value <= MOST_PENALTY,
            f"sampling.{name}",
            f"must be in [-{MOST_PENALTY:g}, {MOST_PENALTY:g}], got {value}",
        )
    found.need(0 < typical <= 1, "sampling.typical_p", f"must be in (0, 1], got {typical}")
    allowed = None
    if sampling.HasField("allowed_token_ids"):
        allowed = _ids(
            sampling.allowed_token_ids.ids, "sampling.allowed_token_ids.ids", info, found
        )
        found.need(len(allowed) > 0, "sampling.allowed_token_ids.ids", "must not be empty")
    banned = _ids(sampling.banned_token_ids, "sampling.banned_token_ids", info, found)
    left = info.vocab_size - len(banned) if allowed is None else len(set(allowed) - set(banned))
    if allowed is None or allowed:
        found.need(left > 0, "sampling.banned_token_ids", "leave no token to choose")
    return LogitParams(
        repetition_penalty=repetition,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias=_bias(sampling, info, found),
        allowed=allowed,
        banned=banned,
        typical_p=typical,
    )


def _ids(ids: Seq[int], field: str, info: ModelInfo, found: Violations) -> tuple[int, ...]:
    """Each once, in order; no more than the vocabulary has."""
    if found.need(
        len(ids) <= info.vocab_size, field, f"{len(ids)} ids are more than the vocabulary has"
    ):
        check_ids(ids, field, info, found)
        return tuple(sorted(set(ids)))
    return ()


def _bias(
    sampling: pb.Sampling, info: ModelInfo, found: Violations
) -> tuple[tuple[int, float], ...]:
    field, bias = "sampling.logit_bias", sampling.logit_bias
    if not found.need(
        len(bias) <= MAX_BIASES, field, f"{len(bias)} entries are over the limit of {MAX_BIASES}"
    ):
        return ()
    for token, value in sorted(bias.items()):
        entry = f"{field}[{token}]"
        found.need(0 <= token < info.vocab_size, entry, "is not a token of the vocabulary")
        found.need(
            -MOST_BIAS <= value <= MOST_BIAS,
            entry,
            f"must be in [-{MOST_BIAS:g}, {MOST_BIAS:g}], got {value}",
        )
    return tuple(sorted(bias.items()))


def _bad_words(sampling: pb.Sampling, found: Violations) -> tuple[str, ...]:
    words = sampling.bad_words
    if not found.need(
        len(words) <= MAX_BAD_WORDS,
        "sampling.bad_words",
        f"{len(words)} words are over the limit of {MAX_BAD_WORDS}",
    ):
        return ()
    for index, word in enumerate(words):
        field = f"sampling.bad_words[{index}]"
        found.need(bool(word.strip()), field, "must not be empty")
        found.need(
            len(word) <= MAX_BAD_WORD,
            field,
            f"{len(word)} characters are over the limit of {MAX_BAD_WORD}",
        )
    return tuple(words)


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
