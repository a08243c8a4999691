"""Who runs, how many rows each, and what becomes of the result. Integers only: no torch, no clock.

A step feeds `tokens[computed:]` of every running sequence: decode rows first, prompt chunks with
what is left of the row budget, running or new. When blocks run out, drafts go first, then the
last sequence in policy order is preempted (it keeps its tokens and its place in the queue, and
is computed again later). Victims always come after everything planned so far, so there is nothing
to undo, and the first sequence in policy order always gets on.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import islice

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.policy import Policy
from engine.rows import share_rows
from engine.types import (
    Finish,
    FinishReason,
    Proposal,
    Request,
    Sequence,
    SourceStats,
    StepPlan,
    TextStream,
    TokenChunk,
    Verdict,
    Work,
)


class Scheduler:
    """Holds every live sequence: waiting in the policy's order, or running.

    `texts` makes the text stream of a request. `context_limit` bounds prompt plus output.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        policy: Policy,
        texts: Callable[[Request], TextStream],
        context_limit: int,
    ) -> None:
        self._config = config
        self._policy = policy
        self._texts = texts
        self._context_limit = context_limit
        self._live: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._waiting = [0, 0, 0]
        self._steps = 0
        self.pool = pool
        self.running: list[Sequence] = []

    # ---- arrivals and departures -------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest for one that can never be served."""
        if request.id in self._live:
            raise InvalidRequest(f"generation {request.id!r} is already live")
        most = min(len(request.prompt) + request.stopping.max_tokens, self._context_limit)
        if not request.prompt or len(request.prompt) > self._context_limit:
            raise InvalidRequest("the prompt is empty or longer than the context")
        if self.pool.blocks_for(most) > self.pool.num_blocks:
            raise InvalidRequest(
                f"{most} tokens can never fit the KV pool of "
                f"{self.pool.num_blocks * self.pool.block_size} tokens"
            )
        seq = Sequence(request, list(request.prompt), self.pool.table(), self._texts(request))
        self._live[request.id] = seq
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
            self._prune_deadlines()
        self._wait(seq)

    def cancel(self, request_id: str, reason: FinishReason, now: float) -> TokenChunk | None:
        """End a live generation now; None if there is none of that id."""
        seq = self._live.get(request_id)
        return None if seq is None else self._end(seq, Finish(reason), now)

    def expire(self, now: float) -> list[TokenChunk]:
        """End what has passed its deadline, running or waiting."""
        chunks = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            seq = self._live.get(request_id)
            # An id may have been used again since; only the live one's own deadline counts.
            due = None if seq is None else seq.request.deadline
            if seq is not None and due is not None and due <= now:
                chunks.append(self._end(seq, Finish(FinishReason.DEADLINE), now))
        return chunks

    def _prune_deadlines(self) -> None:
        """Most requests end long before their deadline."""
        if len(self._deadlines) > 2 * len(self._live) + 100:
            due = ((s.request.deadline, i) for i, s in self._live.items())
            self._deadlines = [(d, i) for d, i in due if d is not None]
            heapq.heapify(self._deadlines)

    def _wait(self, seq: Sequence) -> None:
        self._waiting[seq.request.priority] += 1
        self._policy.push(seq)

    def _unwait(self, seq: Sequence) -> None:
        self._waiting[seq.request.priority] -= 1
        self._policy.discard(seq)

    @property
    def live(self) -> list[str]:
        return list(self._live)

    @property
    def busy(self) -> bool:
        return bool(self._live)

    @property
    def waiting(self) -> int:
        return len(self._policy)

    @property
    def waiting_by_class(self) -> tuple[int, int, int]:
        interactive, standard, batch = self._waiting
        return interactive, standard, batch

    # ---- planning ----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Decide one step and reserve its blocks."""
        newcomers = self._admissible()
        shares = share_rows(
            [*self.running, *newcomers], self._config.max_step_rows, self._policy.rank
        )
        work: list[Work] = []
        preempted = 0
        for seq in self.running:  # victims leave from its end, so they are never reached here
            count = shares[seq]
            fits = self.pool.grow(seq.table, seq.computed + count)
            while not fits and (victim := self.running[-1]) is not seq:
                self._preempt(victim)
                preempted += 1
                fits = self.pool.grow(seq.table, seq.computed + count)
            if fits and count:
                work.append(_work(seq, count))
        if not preempted:
            work += [self._admit(s, shares[s], now) for s in newcomers if shares[s] or not s.goal]
        self._steps += 1
        return StepPlan(self._steps, self._with_drafts(work), preempted)

    def _admissible(self) -> list[Sequence]:
        """Who waits, first to serve first, as far as there are seats and blocks for all they hold,
        beside all that the running ones already need."""
        pool = self.pool
        free = pool.free - sum(
            max(0, pool.blocks_for(s.goal) - len(s.table.ids)) for s in self.running
        )
        found: list[Sequence] = []
        for seq in islice(self._policy.waiting(), self._config.max_seqs - len(self.running)):
            free -= pool.blocks_for(seq.goal)
            if free < 0:
                break
            found.append(seq)
        return found

    def _admit(self, seq: Sequence, count: int, now: float) -> Work:
        self.pool.grow(seq.table, count)
        self._unwait(seq)
        insort(self.running, seq, key=self._policy.rank)
        if seq.scheduled is None:
            seq.scheduled = now
        return _work(seq, count)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq.table)
        seq.computed = seq.drafted = 0
        seq.preemptions += 1
        self._wait(seq)

    def _with_drafts(self, work: list[Work]) -> tuple[Work, ...]:
        """Share the rows left for drafts evenly, as far as blocks go; nobody is preempted."""
        sampling = sum(w.samples for w in work)
        left = self._config.max_step_rows - sum(w.count for w in work)
        spare = min(left, self._config.draft_rows - sampling)
        if spare <= 0 or not sampling:
            return tuple(work)
        out = []
        for item in work:
            if item.samples:
                cap = min(-(-spare // sampling), self._most_drafts(item.seq))
                end = item.start + item.count
                if not self.pool.grow(item.seq.table, end + cap):
                    cap = min(cap, item.seq.table.capacity - end)
                sampling -= 1
                spare -= cap
                item = replace(item, draft_cap=cap)
            out.append(item)
        return tuple(out)

    def _most_drafts(self, seq: Sequence) -> int:
        """Drafts that could still be delivered: one token comes from the target anyway."""
        wanted = seq.request.speculation.max_draft_tokens
        most = self._config.max_draft_tokens
        room = min(seq.left, self._context_limit - len(seq.tokens)) - 1
        return max(0, min(most if wanted is None else min(wanted, most), room))

    # ---- results -----------------------------------------------------------------------------

    def commit(
        self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict], now: float
    ) -> list[TokenChunk]:
        """Take over a step's outcome. Sequences that ended during the forward pass are skipped."""
        chunks = []
        for work, proposal, verdict in zip(plan.work, proposals, verdicts, strict=True):
            seq = work.seq
            if seq.finish is not None:
                continue
            if verdict.error:
                finish = Finish(FinishReason.ERROR, error=verdict.error)
                chunks.append(self._end(seq, finish, now))
                continue
            # Rollback is an assignment: KV of rejected drafts is overwritten by the next feed.
            seq.computed = work.start + work.count + verdict.accepted
            self.pool.shrink(seq.table, seq.computed)
            computed = max(0, min(seq.computed, len(seq.request.prompt)) - work.start)
            chunk = self._emit(seq, proposal, verdict, now)
            self._policy.charge(seq, computed, 0 if chunk is None else len(chunk.tokens))
            if chunk is not None:
                chunks.append(chunk)
        return chunks

    def _emit(
        self, seq: Sequence, proposal: Proposal, verdict: Verdict, now: float
    ) -> TokenChunk | None:
        if verdict.next_token is None:
            done = seq.request.prefill_only and seq.computed >= seq.goal
            return self._end(seq, Finish(FinishReason.LENGTH), now) if done else None
        if seq.prefilled is None:
            seq.prefilled = now
        if seq.first_token is None:
            seq.first_token = now
        offset = seq.generated
        text, finish = self._append(seq, (*proposal.tokens[: verdict.accepted], verdict.next_token))
        seq.target_steps += 1
        if proposal.tokens:
            delivered = min(verdict.accepted, seq.generated - offset)
            stats = SourceStats(len(proposal.tokens), delivered)
            seq.by_source[proposal.source] = (
                seq.by_source.get(proposal.source, SourceStats()) + stats
            )
        tokens = tuple(seq.tokens[len(seq.request.prompt) + offset :])
        if finish is None:
            return TokenChunk(seq.request.id, offset, tokens, text)
        return self._end(seq, finish, now, offset, tokens, text)

    def _append(self, seq: Sequence, tokens: Iterable[int]) -> tuple[str, Finish | None]:
        """Append one by one until something ends the output; what follows is dropped."""
        pieces: list[str] = []
        stopping = seq.request.stopping
        for token in tokens:
            seq.tokens.append(token)
            if token in stopping.stop_ids:
                return "".join(pieces), Finish(FinishReason.STOP, matched=token)
            if token in stopping.eos_ids:
                return "".join(pieces), Finish(FinishReason.EOS)
            try:
                piece, stop = seq.text.push(token)
            except Exception as error:  # a bad id must hurt this request only
                return "".join(pieces), Finish(FinishReason.ERROR, error=f"detokenizing: {error}")
            pieces.append(piece)
            if stop is not None:
                return "".join(pieces), Finish(FinishReason.STOP, matched=stop)
            if seq.left <= 0:
                return "".join(pieces), Finish(FinishReason.LENGTH)
            if len(seq.tokens) >= self._context_limit:
                return "".join(pieces), Finish(FinishReason.CONTEXT)
        return "".join(pieces), None

    def _end(
        self,
        seq: Sequence,
        finish: Finish,
        now: float,
        offset: int | None = None,
        tokens: tuple[int, ...] = (),
        text: str = "",
    ) -> TokenChunk:
        """The only way out: give back everything and make the terminal chunk."""
        request = seq.request
        if finish.reason is not FinishReason.STOP or not isinstance(finish.matched, str):
            text += _flush(seq)
        seq.finish = replace(
            finish,
            prompt_tokens=len(request.prompt),
            completion_tokens=seq.generated,
            arrived=request.arrived,
            scheduled=seq.scheduled,
            prefilled=seq.prefilled,
            first_token=seq.first_token,
            finished=now,
            target_steps=seq.target_steps,
            preemptions=seq.preemptions,
            by_source=tuple(seq.by_source.items()),
        )
        del self._live[request.id]
        self.pool.release(seq.table)
        if seq in self.running:
            self.running.remove(seq)
        else:
            self._unwait(seq)
        start = seq.generated if offset is None else offset
        return TokenChunk(request.id, start, tokens, text, seq.finish)

    def check(self) -> None:
        """Assert the laws of blocks and cursors; cheap enough for every step of a test."""
        self.pool.check(s.table for s in self._live.values())
        assert len(self.running) + self.waiting == len(self._live)
        for seq in self.running:
            assert 0 <= seq.drafted <= seq.computed < len(seq.tokens)
            assert seq.table.capacity >= seq.computed


def _work(seq: Sequence, count: int) -> Work:
    samples = seq.computed + count == len(seq.tokens)
    return Work(seq, seq.computed, count, 0, samples)


def _flush(seq: Sequence) -> str:
    """Text still held back; a text stream that fails has nothing more to say."""
    try:
        return seq.text.flush()
    except Exception:  # the end must come whatever the tokenizer makes of the ids
        return ""
