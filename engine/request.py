"""What a client asks for: frozen types, standard library only. They cross the process line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogitParams:
    """How logits are changed before a token is drawn from them (`engine.logits` has the order).

    `repetition_penalty` divides what speaks for a token of the prompt or the output, or multiplies
    what speaks against it; the other two are subtracted for tokens of the output, once or by
    count. `bias` is added. Of `allowed` (None: all) without `banned` one is drawn; no output
    contains one of `bad_words`. `typical_p` 1 keeps all.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    banned: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    typical_p: float = 1.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn. Applied in the order `logits`, temperature, top-k, top-p, min-p, one
    draw.

    `temperature` 0 is greedy (lowest id wins ties); `top_k` 0, `top_p` 1 and `min_p` 0 keep all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logits: LogitParams = LogitParams()


@dataclass(frozen=True, slots=True)
class StopParams:
    """When the output ends. Per token: stop id or EOS, stop string, `max_tokens`, context.

    `max_tokens` 0 is a prefill-only request: the prompt is computed and nothing is generated.
    `eos_ids` are the model's end-of-sequence ids, empty under `ignore_eos` (but with a grammar).
    Before `min_tokens` nothing but the limits and the end of a grammar ends it: neither kind of id
    is drawn, and stop strings are text.
    """

    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GrammarParams:
    """What the output must match: `kind` json_schema, regex or lark (`engine.grammar`).

    It ends, with one of `StopParams.eos_ids`, where nothing more may come; before that where the
    model ends it, unless `longest`.
    """

    kind: str
    text: str
    longest: bool = False


@dataclass(frozen=True, slots=True)
class OutputParams:
    """What of the output is delivered. `include_stop`: the stop string, or the text of the stop or
    end-of-sequence token, too. `keep_special_tokens`: their text is part of the text.

    `logprobs`: each token comes with its `Logprobs` and so many alternatives (None: without). They
    are of the model's own distribution, or, if `processed_logprobs`, of the one after
    `SamplingParams.logits` and temperature. `prompt_logprobs`: so does each token of the prompt but
    the first, always of the model's own. `text_offsets`: each token comes with its place in the
    text (`TextStream.length`)."""

    include_stop: bool = False
    keep_special_tokens: bool = False
    logprobs: int | None = None
    processed_logprobs: bool = False
    prompt_logprobs: int | None = None
    text_offsets: bool = False


PLAIN = OutputParams()


@dataclass(frozen=True, slots=True)
class ForcedText:
    """What the output must begin with: `tokens`, then `rest`, which the last token may go beyond.
    In `characters` of it no stop string is looked for."""

    tokens: tuple[int, ...]
    rest: bytes
    characters: int


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Per-request speculation. Never changes the output.

    `max_draft_tokens` None: the engine's; 0: off. `sources` empty: all.
    """

    max_draft_tokens: int | None = None
    sources: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for. Times are `time.monotonic()` seconds, comparable across processes.

    `priority` is the class: 0 interactive, 1 standard, 2 batch. KV is shared only between requests
    of one tenant and one `cache_salt`. Requests of one `group` have the same prompt, too: one
    computes it for all (`engine.samples`).
    """

    id: str
    prompt: tuple[int, ...]
    stopping: StopParams
    sampling: SamplingParams = SamplingParams()
    speculation: SpeculationParams = SpeculationParams()
    output: OutputParams = OutputParams()
    grammar: GrammarParams | None = None
    forced: ForcedText | None = None
    tenant: str = "default"
    cache_salt: str = ""
    priority: int = 1
    arrived: float = 0.0
    deadline: float | None = None
    group: str = ""

    @property
    def prefill_only(self) -> bool:
        return self.stopping.max_tokens == 0
