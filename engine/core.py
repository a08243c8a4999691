"""The step: plan, propose, forward, verify, commit. No branch on phase."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.draft import DraftSource
from engine.errors import EngineDead, InvalidRequest
from engine.observer import EngineObserver, NullObserver
from engine.outcome import Finish, FinishReason, TokenChunk
from engine.report import StepClock, make_report
from engine.request import Request
from engine.scheduler import Scheduler
from engine.types import Drawn, Feed, Model, Proposal, StepPlan, Verdict, Work
from engine.verify import verify

# So many steps in a row in which no sequence at all could be computed mean a broken device.
MAX_FAILED_STEPS = 5
# The planner always finds work for a live sequence; a defect must not become a silent spin.
MAX_EMPTY_PLANS = 100


# Whether a request can be submitted at once; if not, what it needs (a grammar) is made in another
# thread, which then calls.
Prepare = Callable[[Request, Callable[[], None]], bool]


class Engine:
    """Advances all sequences together. Single-threaded: one caller owns it.

    `clock` gives monotonic seconds. `model` is the target. `copy_blocks` copies KV blocks, by
    (from, to), in the pools of all models. Whoever must not be kept waiting asks `prepare` before
    `submit`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: Model,
        draft: DraftSource,
        copy_blocks: Callable[[Seq[tuple[int, int]]], None],
        clock: Callable[[], float],
        observer: EngineObserver | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._model = model
        self._draft = draft
        self._copy_blocks = copy_blocks
        self._clock = clock
        self._observer = observer or NullObserver()
        self._ended: list[TokenChunk] = []
        self._failed_steps = 0
        self._stalled = 0
        self.observer_errors = 0
        self.prepare: Prepare = lambda request, then: True

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never be served ends at once with ERROR."""
        try:
            self.scheduler.submit(request)
        except InvalidRequest as error:
            now = self._clock()
            finish = Finish(
                FinishReason.ERROR,
                prompt_tokens=len(request.prompt),
                error=str(error),
                arrived=request.arrived,
                finished=now,
            )
            self._ended.append(TokenChunk(request.id, 0, (), "", finish))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a generation and free its blocks now; unknown ids are ignored."""
        chunk = self.scheduler.cancel(request_id, reason, self._clock())
        if chunk is not None:
            self._ended.append(chunk)
            self._draft.forget(request_id)  # now: the id may be used again before the next step

    def collect(self) -> list[TokenChunk]:
        """What has ended without a step: cancelled, refused, past its deadline.

        To be delivered before the next forward pass, which may take long.
        """
        expired = self.scheduler.expire(self._clock())
        for chunk in expired:
            self._draft.forget(chunk.request_id)
        ended, self._ended = self._ended + expired, []
        return ended

    @property
    def busy(self) -> bool:
        return bool(self._ended) or self.scheduler.busy

    def step(self, poll: Callable[[], None] = lambda: None) -> list[TokenChunk]:
        """Advance every runnable sequence once and return what came out.

        `poll` runs between forward and commit: it applies cancellations that arrived meanwhile
        (through `cancel`), so that no token of a cancelled generation is ever delivered.
        """
        ended = self.collect()
        clock = StepClock(self._clock)
        plan = self.scheduler.plan(clock.now)
        if plan.copies:
            self._copy_blocks(plan.copies)
        clock.lap("plan")
        self._stalled = self._stalled + 1 if self.scheduler.busy and not plan else 0
        if self._stalled > MAX_EMPTY_PLANS:
            raise EngineDead("sequences are live, but none could be planned")
        chunks: list[TokenChunk] = []
        if plan:
            proposals = self._draft.propose(plan)
            clock.lap("propose")
            drawn = self._forward(plan, proposals)
            clock.lap("forward")
            poll()
            verdicts = verify(proposals, drawn)
            self._draft.observe(plan, proposals, verdicts)
            for work in plan.work:
                if work.seq.finish is not None:  # cancelled meanwhile, and just noted again
                    self._draft.forget(work.seq.request.id)
            chunks = self.scheduler.commit(plan, proposals, verdicts, clock.now)
            clock.lap("commit")
            self._report(clock, plan, proposals, verdicts, chunks)
        for chunk in chunks:
            if chunk.finish is not None:
                self._draft.forget(chunk.request_id)
        return ended + chunks + self.collect()  # who expired just now still gets this step

    def _report(
        self,
        clock: StepClock,
        plan: StepPlan,
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        chunks: Seq[TokenChunk],
    ) -> None:
        errors = self._draft.errors
        try:
            self._observer.step(
                make_report(clock, plan, proposals, verdicts, chunks, self.scheduler, errors)
            )
        except Exception:  # telemetry never reaches a generation
            self.observer_errors += 1

    def _forward(self, plan: StepPlan, proposals: Seq[Proposal]) -> list[Drawn | str]:
        """One pass for all. If it raises, each on its own, so that only the culprit fails."""
        feeds = [make_feed(w, p) for w, p in zip(plan.work, proposals, strict=True)]
        try:
            results: list[Drawn | str] = list(self._model.run(feeds))
        except Exception as error:  # isolated below
            results = [self._alone(f) if len(feeds) > 1 else _cause(error) for f in feeds]
        all_failed = all(isinstance(r, str) for r in results)
        self._failed_steps = self._failed_steps + 1 if all_failed else 0
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineDead(
                f"{MAX_FAILED_STEPS} steps in a row failed, the last with {results[0]}"
            )
        return results

    def _alone(self, feed: Feed) -> Drawn | str:
        try:
            return self._model.run([feed])[0]
        except Exception as own:  # becomes this sequence's ERROR
            return _cause(own)


def make_feed(work: Work, proposal: Proposal) -> Feed:
    """What the target is fed of a sequence: its new tokens, then the drafts."""
    seq = work.seq
    tokens = tuple(seq.tokens[work.start : work.start + work.count]) + proposal.tokens
    sample = 1 + len(proposal.tokens) if work.samples else 0
    request = seq.request
    return Feed(
        tokens,
        work.start,
        seq.table.ids,
        sample,
        request.sampling,
        seq.rules,
        request.output,
        _known(work) if seq.untold else (),
        proposal.probs,
    )


def _known(work: Work) -> tuple[int, ...]:
    """Tokens that follow rows of the prompt and are yet to be told. There is no output yet, so
    these rows are the last ones before those to sample."""
    first = max(work.start, work.seq.told)
    return work.seq.request.prompt[first + 1 : work.start + work.count + 1]


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
