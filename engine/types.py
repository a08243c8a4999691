"""The engine's own data: plain types, standard library only.

`Sequence` is the one mutable class; everything else is frozen. What comes in is in
`engine.request`, what goes out in `engine.outcome`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.outcome import Finish, Logprobs, SourceStats
from engine.request import PLAIN, OutputParams, Request, SamplingParams


class TextStream(Protocol):
    """Turns output ids into text as they come, and watches for stop strings."""

    @property
    def length(self) -> int:
        """Characters complete so far, held back for a stop string or not: where the text of the
        next token begins, or the character that it goes on with."""
        ...

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
    offsets: list[int] = field(default_factory=list)  # of each output token, if asked for
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
    the sequences that begin or begin again, `found` had their KV in the prefix cache. `running`
    sequences have a seat, some of which may have to wait for their prompt's turn.
    """

    number: int
    work: tuple[Work, ...]
    preempted: int = 0
    copies: tuple[tuple[int, int], ...] = ()
    looked_up: int = 0
    found: int = 0
    running: int = 0

    def __bool__(self) -> bool:
        return bool(self.work)

    @property
    def rows(self) -> int:
        return sum(w.count for w in self.work)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses for the tokens after the last one of a sequence; empty is ordinary.

    `probs`: what each was drawn from, a (vocabulary,) tensor; None: it was no matter of chance.
    Only rejection sampling asks (`engine.rejection`). Whether a token is among `tokens` must then
    not depend on what it is. `grades`: how much each guess rests on, 0 for the least, in grades of
    the source's own; none: all are of grade 0. Guesses of one grade and position are taken to be
    equally good (`engine.acceptance`). There may be more grades than tokens.
    """

    tokens: tuple[int, ...] = ()
    source: str = ""
    probs: Any = None
    grades: tuple[int, ...] = ()


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
    follows its row. `draft_probs` are those of the proposal.
    """

    tokens: tuple[int, ...]
    start: int
    blocks: Seq[int]
    sample: int
    sampling: SamplingParams
    rules: LogitRules | None = None
    output: OutputParams = PLAIN
    known: tuple[int, ...] = ()
    draft_probs: Any = None

    @property
    def drafts(self) -> tuple[int, ...]:
        """The tokens that are guesses: the row of each is drawn from."""
        return self.tokens[len(self.tokens) - self.sample + 1 :] if self.sample else ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a pass gives for one feed: its `sample` tokens in row order, one of `engine.verify`'s
    ERRORS where none can be drawn; and, if the feed asks for them, the logprobs of these tokens, at
    least up to the first that differs from its draft. `known` are those of the feed's `known`
    tokens. `probs`: see `Proposal`. `sure`: how likely each token was by the logits alone, if the
    model is one that says so."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    known: tuple[Logprobs, ...] = ()
    probs: Any = None
    sure: tuple[float, ...] = ()


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
    weights: str = "auto"

    @property
    def kv_capacity_tokens(self) -> int:
        return self.block_size * self.num_blocks
