"""The engine's data: plain types, standard library only.

`Sequence` is the one mutable class. Everything else is frozen, and everything that crosses the
process line (`Request`, `TokenChunk`, `Finish`, `ModelInfo`, ...) is small and picklable.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class FinishReason(StrEnum):
    """Why a generation ended; the names are those of the wire."""

    STOP = "STOP"
    EOS = "EOS"
    LENGTH = "LENGTH"
    CONTEXT = "CONTEXT"
    CANCELLED = "CANCELLED"
    REPLACED = "REPLACED"
    DEADLINE = "DEADLINE"
    TIME_BUDGET = "TIME_BUDGET"
    STALLED = "STALLED"
    DRAINED = "DRAINED"
    ERROR = "ERROR"


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
    the first, always of the model's own."""

    include_stop: bool = False
    keep_special_tokens: bool = False
    logprobs: int | None = None
    processed_logprobs: bool = False
    prompt_logprobs: int | None = None


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


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Drafts of one source: how many were verified, how many were accepted and delivered."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: SourceStats) -> SourceStats:
        return SourceStats(self.drafted + other.drafted, self.accepted + other.accepted)


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation: reason, exact usage, times and speculation counts.

    `cached_tokens` of the prompt were never computed: their KV was found. `matched` is the stop
    string or stop id for STOP. `error` and `retryable` are set for ERROR. Times are monotonic
    seconds; `scheduled` and `first_token` are None if never reached.
    """

    reason: FinishReason
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    matched: str | int | None = None
    error: str = ""
    retryable: bool = False
    arrived: float = 0.0
    scheduled: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    finished: float = 0.0
    target_steps: int = 0
    preemptions: int = 0
    by_source: tuple[tuple[str, SourceStats], ...] = ()

    @property
    def drafts(self) -> SourceStats:
        return sum((s for _, s in self.by_source), SourceStats())


class Logprobs(NamedTuple):
    """How likely `token` was, and the most likely tokens: natural logarithms of probabilities.

    `ids` are in descending order of `values`, the lower id first among equals. What cannot be
    drawn at all is not among them.
    """

    token: int
    logprob: float
    ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What leaves the engine for one generation: `tokens` follow the first `offset` ones.

    `logprobs` has one entry per token, or none if they were not asked for. `prompt_logprobs` are
    those of the next tokens of the prompt; together, in order, of all but the first.
    """

    request_id: str
    offset: int
    tokens: tuple[int, ...]
    text: str
    finish: Finish | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()

    def __reduce__(self) -> tuple[type[TokenChunk], tuple[object, ...]]:
        # Dozens cross the process line in each step; what pickle does by itself takes five times
        # as long.
        fields = (
            self.request_id,
            self.offset,
            self.tokens,
            self.text,
            self.finish,
            self.logprobs,
            self.prompt_logprobs,
        )
        return TokenChunk, fields


class TextStream(Protocol):
    """Turns output ids into text as they come, and watches for stop strings."""

    def push(self, token: int) -> tuple[str, str | None]:
        """Text that became final with `token`, and the stop string it completed, if any."""
        ...

    def flush(self) -> str:
        """Text still held back, at the end of the output."""
        ...


class OutputGrammar(Protocol):
    """What a sequence's output must match; knows the tokens so far."""

    @property
    def fault(self) -> str:
        """Why no token can be drawn next; empty as long as one can."""
        ...

    def legal(self, drafts: Seq[int]) -> int:
        """How many of `drafts` can come next, one after another."""
        ...

    def forced(self, most: int) -> tuple[int, ...]:
        """Tokens that come next whatever the model says, at most so many."""
        ...


class LogitRules(Protocol):
    """What a sequence's parameters do to its logits, row by row; knows the tokens so far."""

    @property
    def grammar(self) -> OutputGrammar | None:
        """What the output must match, if anything."""
        ...

    def forced(self, most: int) -> tuple[int, ...]:
        """Tokens that come next whatever the model says, at most so many."""
        ...

    def apply(self, logits: Any, drafts: Seq[int]) -> None:
        """Change `logits` (1 + len(drafts), vocabulary) float32 in place. Row 0 is drawn after the
        tokens so far, row j after these and `drafts[:j]`. What was set up is as before afterwards.
        """
        ...

    def advance(self, tokens: Seq[int]) -> None:
        """`tokens` have become part of the output."""
        ...


@dataclass(slots=True)
class BlockTable:
    """The physical blocks of one sequence, in order. Target and draft pools share the ids."""

    block_size: int
    ids: list[int] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        return len(self.ids) * self.block_size


@dataclass(slots=True, eq=False)
class Sequence:
    """A running request: one append-only token list with two cursors.

    `tokens[:computed]` have valid target KV, `tokens[:drafted]` valid draft KV. Prefill, decode,
    verification and resumption after preemption are all "feed `tokens[computed:]`". There is no
    status: where a sequence is (waiting, running, neither) is its status.

    Laws while running: 0 <= drafted <= computed < len(tokens), table.capacity >= computed.
    """

    request: Request
    tokens: list[int]
    table: BlockTable
    text: TextStream
    rules: LogitRules | None = None  # None: logits are drawn from as they are
    computed: int = 0
    drafted: int = 0
    told: int = 0  # tokens of the prompt, from the second on, whose logprobs are delivered
    finish: Finish | None = None
    # Names of its full blocks for the prefix cache, as far as they were needed (`engine.prefix`).
    names: list[bytes] = field(default_factory=list)
    # Times and counts for `Finish`.
    cached: int = 0
    scheduled: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    target_steps: int = 0
    preemptions: int = 0
    by_source: dict[str, SourceStats] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def goal(self) -> int:
        """How far `computed` must get before a token can be sampled (or a prefill-only ends)."""
        return len(self.tokens) - self.request.prefill_only

    @property
    def untold(self) -> bool:
        """Whether rows of the prompt must be computed for their logprobs."""
        request = self.request
        return request.output.prompt_logprobs is not None and self.told < len(request.prompt) - 1

    @property
    def left(self) -> int:
        """Tokens the client may still get."""
        return self.request.stopping.max_tokens - self.generated


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: feed `tokens[start:start+count]`, then the drafts.

    `samples` iff that reaches the end of `tokens`, so that the last row yields a new token.
    """

    seq: Sequence
    start: int
    count: int
    draft_cap: int = 0
    samples: bool = True

    def capped(self, draft_cap: int) -> Work:
        """The same with another cap."""
        return Work(self.seq, self.start, self.count, draft_cap, self.samples)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's decision. Blocks for every row, drafts included, are reserved.

    `copies` are (from, to) blocks to copy in all pools before any pass. Of `looked_up` tokens of
    the sequences that begin or begin again, `found` had their KV in the prefix cache.
    """

    number: int
    work: tuple[Work, ...]
    preempted: int = 0
    copies: tuple[tuple[int, int], ...] = ()
    looked_up: int = 0
    found: int = 0

    def __bool__(self) -> bool:
        return bool(self.work)

    @property
    def rows(self) -> int:
        return sum(w.count for w in self.work)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses for the tokens after the last one of a sequence; empty is ordinary."""

    tokens: tuple[int, ...] = ()
    source: str = ""


NO_PROPOSAL = Proposal()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of verification: keep `accepted` drafts, then `next_token`.

    (0, None) iff the work does not sample. `error` set: this sequence failed in this step.
    `logprobs` are of the kept drafts and of `next_token`, if asked for, `known` as in `Drawn`.
    """

    accepted: int = 0
    next_token: int | None = None
    error: str = ""
    logprobs: tuple[Logprobs, ...] = ()
    known: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Feed:
    """Rows of one sequence for one forward pass of a model over paged KV.

    Feeds `tokens` at absolute positions `start...`, K/V written through `blocks`. The last
    `sample` rows each yield a token: the row of position p yields the one for position p + 1,
    drawn with the noise of that position, from logits that `rules` has changed: all but the first
    of these rows are of drafts. `output` says which logprobs are wanted.

    The rows before these, as many as `known`, are asked how likely those tokens are, each of which
    follows its row.
    """

    tokens: tuple[int, ...]
    start: int
    blocks: Seq[int]
    sample: int
    sampling: SamplingParams
    rules: LogitRules | None = None
    output: OutputParams = OutputParams()
    known: tuple[int, ...] = ()

    @property
    def drafts(self) -> tuple[int, ...]:
        """The tokens that are guesses: the row of each is drawn from."""
        return self.tokens[len(self.tokens) - self.sample + 1 :] if self.sample else ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a pass gives for one feed: its `sample` tokens in row order, -1 where the row's logits
    were not usable (NaN); and, if the feed asks for them, the logprobs of these tokens, at least up
    to the first that differs from its draft. `known` are those of the feed's `known` tokens."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    known: tuple[Logprobs, ...] = ()


class Model(Protocol):
    """A causal LM over a paged KV pool."""

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        """One forward pass; what each feed gives.

        Running the same feed again is harmless: it writes the same K/V to the same place.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the service needs to know about the loaded model.

    `strict`: the same request has the same bytes in any company, with any drafts.
    """

    model: str
    architecture: str
    directory: str
    context_limit: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    draft_sources: tuple[str, ...]
    max_draft_tokens: int
    block_size: int
    num_blocks: int
    fingerprint: str
    strict: bool = False
    not_strict_because: str = ""
    kv_dtype: str = ""

    @property
    def kv_capacity_tokens(self) -> int:
        return self.block_size * self.num_blocks
