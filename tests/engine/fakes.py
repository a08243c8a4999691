"""Fakes for the engine: a model that answers from what it reads through the block table."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.core import Engine
from engine.draft import DraftSource
from engine.draft_choice import DraftChoice
from engine.draft_guard import GuardedDraft
from engine.draft_model import ModelDraft
from engine.draft_ngram import NgramDraft
from engine.draft_passes import Priced
from engine.draft_suffix import SuffixDraft
from engine.observer import StepReport
from engine.outcome import Finish, Logprobs, TokenChunk
from engine.policy import ClassArrival, Policy
from engine.prefix import NoPrefixCache, PrefixCache
from engine.request import OutputParams, Request, SamplingParams, SpeculationParams, StopParams
from engine.scheduler import RowsWithin, Scheduler
from engine.step_costs import FREE, StepCosts
from engine.text import StopStrings
from engine.training.evaluate import NOTHING
from engine.types import (
    NO_PROPOSAL,
    Drawn,
    Feed,
    Model,
    Proposal,
    StepPlan,
    TextStream,
    Verdict,
    Work,
)

VOCAB = 7
EOS = 0
BLOCK = 4

NextToken = Callable[[Seq[int], SamplingParams], int]


def hash_next(context: Seq[int], sampling: SamplingParams) -> int:
    """The "true" next token: a hash of the whole context and, above temperature 0, the seed."""
    h = 1469598103 if sampling.temperature == 0 else (sampling.seed * 2654435761) & 0xFFFFFFFF
    for token in context:
        h = ((h ^ (token + 1)) * 16777619) & 0xFFFFFFFF
    return (h >> 7) % VOCAB


def often_right(context: Seq[int], sampling: SamplingParams) -> int:
    token = hash_next(context, sampling)
    return token if (sum(context) * 31 + len(context)) % 3 else (token + 1) % VOCAB


class HashModel:
    """KV slots hold token ids; every answer depends on each of them, so a slip in paging,
    rollback or order changes the output."""

    def __init__(self, next_token: NextToken, num_blocks: int, block_size: int = BLOCK) -> None:
        self._next = next_token
        self._block_size = block_size
        self.kv: list[int | None] = [None] * (num_blocks * block_size)
        self.rows = 0
        self.runs = 0

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        self.runs += 1
        for feed in feeds:
            assert feed.sample <= len(feed.tokens), "samples a row that is not fed"
            for i, token in enumerate(feed.tokens):
                assert 0 <= token < VOCAB
                self.kv[self._slot(feed, feed.start + i)] = token
                self.rows += 1
        return [self._draw(feed) for feed in feeds]

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        size = self._block_size
        held = [self.kv[source * size : (source + 1) * size] for source, _ in pairs]
        for (_, target), content in zip(pairs, held, strict=True):
            self.kv[target * size : (target + 1) * size] = content

    def _slot(self, feed: Feed, position: int) -> int:
        block = feed.blocks[position // self._block_size]
        return block * self._block_size + position % self._block_size

    def _draw(self, feed: Feed) -> Drawn:
        """A logprob says for which position it is."""
        end = feed.start + len(feed.tokens) + 1
        drawn = end - feed.sample
        tokens = self._answers(feed)
        known = _placed(feed.known, drawn - len(feed.known))
        asked = feed.output.logprobs is not None
        return Drawn(tokens, _placed(tokens, drawn) if asked else (), known)

    def _answers(self, feed: Feed) -> tuple[int, ...]:
        end = feed.start + len(feed.tokens)
        context: list[int] = []
        for position in range(end):
            token = self.kv[self._slot(feed, position)]
            assert token is not None, "read a slot that was never written"
            context.append(token)
        return tuple(
            self._next(context[:n], feed.sampling) for n in range(end - feed.sample + 1, end + 1)
        )


def _placed(tokens: Seq[int], start: int) -> tuple[Logprobs, ...]:
    return tuple(Logprobs(t, -float(p)) for p, t in enumerate(tokens, start))


class Watched:
    """The target, seen to write only blocks that are its sequence's alone and have no name."""

    def __init__(self, model: Model, pool: BlockPool) -> None:
        self._model = model
        self._pool = pool

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        size = self._pool.block_size
        for feed in feeds:
            end = feed.start + len(feed.tokens)
            for block in feed.blocks[feed.start // size : -(-end // size)]:
                assert self._pool._refs[block] == 1, "writes a block that others hold"
                assert self._pool._names[block] is None, "writes a block that others may find"
        return self._model.run(feeds)


class PlainText:
    """Text stream that writes token t as one letter."""

    def __init__(self, stops: Seq[str] = ()) -> None:
        self._stops = StopStrings(stops)
        self.length = 0

    def push(self, token: int) -> tuple[str, str | None]:
        self.length += 1
        return self._stops.push(letters([token]))

    def flush(self) -> str:
        return self._stops.flush()


def letters(tokens: Seq[int]) -> str:
    """What `PlainText` makes of them."""
    return "".join(chr(ord("a") + token) for token in tokens)


def plain_text(request: Request) -> TextStream:
    return PlainText(request.stopping.strings)


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class RecordingObserver:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        self.reports.append(report)


class JunkDraft:
    """Random guesses on random steps, among them right ones by luck."""

    name = "junk"
    errors = 0

    def __init__(self, rng: random.Random, vocab: int = VOCAB) -> None:
        self._rng = rng
        self._vocab = vocab

    def propose(self, plan: StepPlan) -> list[Proposal]:
        return [self._one(w.draft_cap) for w in plan.work]

    def _one(self, cap: int) -> Proposal:
        n = self._rng.randint(0, cap)
        tokens = tuple(self._rng.randrange(self._vocab) for _ in range(n))
        return Proposal(tokens, self.name) if tokens else NO_PROPOSAL

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        return None

    def forget(self, request_id: str) -> None:
        return None


class WrongDraft(JunkDraft):
    """As many guesses as it may make, each of them wrong."""

    name = "wrong"

    def propose(self, plan: StepPlan) -> list[Proposal]:
        return [Proposal(self._guesses(w), self.name) for w in plan.work]

    def _guesses(self, work: Work) -> tuple[int, ...]:
        right = hash_next(work.seq.tokens, work.seq.request.sampling)
        return ((right + 1) % VOCAB,) * work.draft_cap


def choice(sources: Seq[DraftSource]) -> DraftChoice:
    """Between sources whose drafts cost nothing, so that each is verified."""
    models = [s for s in sources if isinstance(s, ModelDraft)]
    return DraftChoice(
        [s for s in sources if not isinstance(s, ModelDraft)],
        [Priced(s, StepCosts(NOTHING)) for s in models],
        costs=StepCosts(FREE),
    )


class Rig:
    """An engine over hash models, small enough to look into.

    `wrap` may put something between engine and target; `source` replaces the draft of that name.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        draft: str = "none",
        source: DraftSource | None = None,
        wrap: Callable[[Model], Model] = lambda model: model,
        texts: Callable[[Request], TextStream] = plain_text,
        rng: random.Random | None = None,
        policy: Policy | None = None,
        prefix_cache: bool = False,
        context_limit: int = 10_000,
        block_size: int = BLOCK,
        draft_rows: int = 64,
        max_draft_tokens: int = 4,
        max_seqs: int = 8,
        max_step_rows: int = 24,
        rows_within: RowsWithin | None = None,
    ) -> None:
        self.config = EngineConfig(
            max_draft_tokens=max_draft_tokens,
            max_seqs=max_seqs,
            max_step_rows=max_step_rows,
            draft_rows=draft_rows,
        )
        self.clock = ManualClock()
        self.observer = RecordingObserver()
        self.pool = BlockPool(num_blocks, block_size)
        self.target = HashModel(hash_next, num_blocks, block_size)
        self.models = [self.target]
        self.draft = source or self._source(draft, rng or random.Random(0), context_limit)
        self.policy = ClassArrival() if policy is None else policy
        self.prefixes = PrefixCache(self.pool, b"key") if prefix_cache else NoPrefixCache()
        limits = {} if rows_within is None else {"rows_within": rows_within}
        self.scheduler = Scheduler(
            self.config, self.pool, self.prefixes, self.policy, texts, context_limit, **limits
        )
        self.engine = Engine(
            self.scheduler,
            Watched(wrap(self.target), self.pool),
            GuardedDraft(self.draft, VOCAB),
            self._copy_blocks,
            self.clock,
            self.observer,
        )
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.copies = 0

    def _source(self, kind: str, rng: random.Random, context_limit: int) -> DraftSource:
        def model(next_token: NextToken) -> ModelDraft:
            self.draft_model = HashModel(next_token, self.pool.num_blocks, self.pool.block_size)
            self.models.append(self.draft_model)
            return ModelDraft(self.draft_model, self.config.max_step_rows, context_limit)

        makers: dict[str, Callable[[], Seq[DraftSource]]] = {
            "none": list,
            "ngram": lambda: [NgramDraft()],
            "ngram,suffix": lambda: [NgramDraft(), SuffixDraft()],
            "model": lambda: [model(often_right)],
            "perfect": lambda: [model(hash_next)],
            "junk": lambda: [JunkDraft(rng)],
            "wrong": lambda: [WrongDraft(rng)],
            "ngram,model": lambda: [NgramDraft(), model(often_right)],
            "junk,perfect": lambda: [JunkDraft(rng), model(hash_next)],
        }
        return choice(makers[kind]())

    def _copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        self.copies += len(pairs)
        for model in self.models:
            model.copy_blocks(pairs)

    def submit(
        self,
        request_id: str,
        prompt: Seq[int],
        max_tokens: int,
        *,
        priority: int = 1,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        deadline: float | None = None,
        stop_ids: frozenset[int] = frozenset(),
        strings: tuple[str, ...] = (),
        ignore_eos: bool = False,
        tenant: str = "default",
        cache_salt: str = "",
        output: OutputParams | None = None,
        group: str = "",
    ) -> None:
        eos = frozenset() if ignore_eos else frozenset({EOS})
        self.engine.submit(
            Request(
                request_id,
                tuple(prompt),
                StopParams(max_tokens, stop_ids, eos, strings),
                sampling or SamplingParams(temperature=0.0),
                speculation or SpeculationParams(),
                output or OutputParams(),
                tenant=tenant,
                cache_salt=cache_salt,
                priority=priority,
                arrived=self.clock.now,
                deadline=deadline,
                group=group,
            )
        )

    def step(self, poll: Callable[[], None] = lambda: None) -> list[TokenChunk]:
        self.clock.now += 0.01
        chunks = self.engine.step(poll)
        self.scheduler.check()
        for chunk in chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
        return chunks

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.engine.busy:
                return
            self.step()
        assert not self.engine.busy, "livelock"

    def tokens(self, request_id: str) -> list[int]:
        """Delivered tokens; checks that offsets are gapless and the end comes once and last."""
        chunks = self.chunks.get(request_id, [])
        out: list[int] = []
        for chunk in chunks:
            assert chunk.offset == len(out)
            out.extend(chunk.tokens)
        assert all(c.finish is None for c in chunks[:-1])
        return out

    def logprobs(self, request_id: str) -> list[Logprobs]:
        """Delivered logprobs; checks that each chunk has as many as tokens, or none."""
        chunks = self.chunks.get(request_id, [])
        for chunk in chunks:
            assert len(chunk.logprobs) in (0, len(chunk.tokens))
        return [entry for chunk in chunks for entry in chunk.logprobs]

    def prompt_logprobs(self, request_id: str) -> list[Logprobs]:
        """Delivered logprobs of the prompt; checks that they come before what follows it."""
        chunks = self.chunks.get(request_id, [])
        for chunk in chunks:
            assert not (chunk.prompt_logprobs and chunk.offset)
        return [entry for chunk in chunks for entry in chunk.prompt_logprobs]

    def text(self, request_id: str) -> str:
        return "".join(c.text for c in self.chunks.get(request_id, []))

    def finish(self, request_id: str) -> Finish:
        """The end of a generation; checks that usage agrees with what was delivered."""
        finish = self.chunks[request_id][-1].finish
        assert finish is not None, "not ended"
        assert finish.completion_tokens == len(self.tokens(request_id))
        return finish

    def totals(self) -> tuple[int, int]:
        """Drafts verified and drafts accepted, over all steps."""
        reports = self.observer.reports
        return sum(r.drafted for r in reports), sum(r.accepted for r in reports)


def reference(
    prompt: Seq[int],
    max_tokens: int,
    sampling: SamplingParams | None = None,
    stop_ids: frozenset[int] = frozenset({EOS}),
) -> list[int]:
    """What one sequence alone, without engine, would give."""
    context, out = list(prompt), []
    while len(out) < max_tokens:
        token = hash_next(context, sampling or SamplingParams(temperature=0.0))
        context.append(token)
        out.append(token)
        if token in stop_ids:
            break
    return out
