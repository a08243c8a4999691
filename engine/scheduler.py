"""Who runs, how many rows each, and what becomes of the result. Integers only: no torch, no clock.

A step feeds `tokens[computed:]` of every running sequence: decode rows first, prompt chunks with
what is left of the row budget, running or new. A new one begins behind what the prefix cache has
of it. When blocks run out, drafts go first, then the last sequence in policy order is preempted
(it keeps its tokens and its place in the queue, and is computed again later). Victims always come
after everything planned so far, so there is nothing to undo, and the first sequence in policy
order always gets on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import islice

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.deadlines import Deadlines
from engine.errors import InvalidRequest
from engine.outcome import Finish, FinishReason, TokenChunk
from engine.output import account, append_tokens, closing_text, count_drafts
from engine.policy import Policy
from engine.prefix import Hit, Prefixes
from engine.request import Request
from engine.rows import share_rows
from engine.samples import Samples
from engine.types import LogitRules, Proposal, Sequence, StepPlan, TextStream, Verdict, Work

# Rows that a step may have to end within so many seconds, by the positions of context it has, the
# rows of sequences that decode, and the most there may be (`engine.step_costs`).
RowsWithin = Callable[[float, int, int, int], int]


PROMPTS = 0.9  # of the time of a step; drafts of those who decode have the rest


class Scheduler:
    """Holds every live sequence: waiting in the policy's order, or running.

    `texts` makes the text stream of a request, `rules` what changes its logits (None: nothing
    does). `context_limit` bounds prompt plus output.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        prefixes: Prefixes,
        policy: Policy,
        texts: Callable[[Request], TextStream],
        context_limit: int,
        rules: Callable[[Request], LogitRules | None] = lambda request: None,
        rows_within: RowsWithin = lambda seconds, context, decoding, most: most,
    ) -> None:
        self._rules = rules
        self._rows_within = rows_within
        self._config = config
        self._prefixes = prefixes
        self._samples = Samples(pool, prefixes)
        self._policy = policy
        self._texts = texts
        self._context_limit = context_limit
        self._live: dict[str, Sequence] = {}
        self._deadlines = Deadlines()
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
        text, rules = self._texts(request), self._rules(request)
        seq = Sequence(request, list(request.prompt), self.pool.table(), text, rules)
        self._live[request.id] = seq
        self._samples.add(seq)
        self._deadlines.add(request.id, request.deadline)
        self._wait(seq)

    def cancel(self, request_id: str, reason: FinishReason, now: float) -> TokenChunk | None:
        """End a live generation now; None if there is none of that id."""
        seq = self._live.get(request_id)
        return None if seq is None else self._end(seq, Finish(reason), now)

    def expire(self, now: float) -> list[TokenChunk]:
        """End what has passed its deadline, running or waiting."""
        finish = Finish(FinishReason.DEADLINE)
        return [self._end(self._live[i], finish, now) for i in self._deadlines.due(now)]

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
        # Newcomers have room beside all that the running ones need, so where there are any nobody
        # is preempted.
        hits = self._admissible()
        needs = {s: s.goal - s.computed for s in self.running}
        needs |= {s: s.goal - hit.tokens for s, hit in hits.items()}
        shares = share_rows(needs, self._row_budget(needs), self._policy.rank)
        begun = [s for s in hits if shares[s] or not needs[s]]
        for seq in begun:
            self._admit(seq, hits[seq], now)
        work: list[Work] = []
        preempted = 0
        for seq in self.running:  # victims leave from its end, so they are never reached here
            count = shares.get(seq, 0)
            fits = self._reserve(seq, count)
            while not fits and (victim := self.running[-1]) is not seq:
                self._preempt(victim)
                preempted += 1
                fits = self._reserve(seq, count)
            if fits and (count or seq.computed >= seq.goal):
                work.append(_work(seq, count))
        self._steps += 1
        return StepPlan(
            self._steps,
            self._with_drafts(work),
            preempted,
            self.pool.take_copies(),
            looked_up=sum(hits[s].looked_up for s in begun),
            found=sum(hits[s].tokens for s in begun),
            running=len(self.running),
        )

    def _row_budget(self, needs: Mapping[Sequence, int]) -> int:
        """Rows of the step, drafts aside."""
        most = self._config.max_step_rows
        if sum(needs.values()) <= len(needs):  # nobody has a prompt to get on with
            return most
        context = sum(s.computed for s in needs)
        decoding = sum(need <= 1 for need in needs.values())
        return self._rows_within(PROMPTS * self._config.step_s, context, decoding, most)

    def _admissible(self) -> dict[Sequence, Hit]:
        """Who waits, first to serve first, as far as there are seats and blocks for all they hold,
        beside all that the running ones already need; and what each may begin with."""
        seats = self._config.max_seqs - len(self.running)
        if not seats or not self.waiting:
            return {}
        pool = self.pool
        free = pool.free - sum(
            max(0, pool.blocks_for(s.goal) - len(s.table.ids)) for s in self.running
        )
        found: dict[Sequence, Hit] = {}
        hits = ((s, self._samples.look_up(s)) for s in self._policy.waiting())
        ready = ((s, hit) for s, hit in hits if hit is not None)
        for seq, hit in islice(ready, seats):
            free -= pool.blocks_for(seq.goal) - hit.spared
            if free < 0:
                break
            found[seq] = hit
        return found

    def _admit(self, seq: Sequence, hit: Hit, now: float) -> None:
        self.pool.hold(seq.table, hit.blocks)
        seq.computed, seq.drafted = hit.tokens, hit.drafted
        self._unwait(seq)
        insort(self.running, seq, key=self._policy.rank)
        cached = min(hit.tokens, len(seq.request.prompt))
        seq.cached = cached if seq.scheduled is None else min(cached, seq.cached)
        if seq.scheduled is None:
            seq.scheduled = now

    def _reserve(self, seq: Sequence, count: int) -> bool:
        """Blocks for the next `count` rows, the first of which may lie in a block of others."""
        if not count:
            return True
        pool, table, end = self.pool, seq.table, seq.computed + count
        return pool.own(table, seq.computed) and (table.capacity >= end or pool.grow(table, end))

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
                item = item.capped(cap)
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
            if work.seq.finish is None:
                chunk = self._take_over(work, proposal, verdict, now)
                if chunk is not None:
                    chunks.append(chunk)
        return chunks

    def _take_over(
        self, work: Work, proposal: Proposal, verdict: Verdict, now: float
    ) -> TokenChunk | None:
        seq = work.seq
        if verdict.error:
            # What it computed may be what is wrong: nobody else shall begin with it.
            self.pool.unname(seq.table)
            grammar = None if seq.rules is None else seq.rules.grammar
            error = (grammar and grammar.fault) or verdict.error
            return self._end(seq, Finish(FinishReason.ERROR, error=error), now)
        # Rollback is an assignment: KV of rejected drafts is overwritten by the next feed.
        seq.computed = work.start + work.count + verdict.accepted
        if work.draft_cap:
            self.pool.shrink(seq.table, seq.computed)
        offset = seq.generated
        text, finish = self._emit(seq, proposal, verdict, now)
        self._prefixes.keep(seq, work.start)
        tokens = tuple(seq.tokens[len(seq.request.prompt) + offset :])
        computed = max(0, min(seq.computed, len(seq.request.prompt)) - work.start)
        self._policy.charge(seq, computed, len(tokens))
        logprobs = verdict.logprobs[: len(tokens)]
        seq.told += len(verdict.known)
        told = logprobs, verdict.known, tuple(seq.offsets[offset:])
        chunk = TokenChunk(seq.request.id, offset, tokens, text, None, *told)
        if finish is not None:
            return self._end(seq, finish, now, chunk)
        return chunk if tokens or verdict.known else None

    def _emit(
        self, seq: Sequence, proposal: Proposal, verdict: Verdict, now: float
    ) -> tuple[str, Finish | None]:
        """Append what the step gave."""
        if verdict.next_token is None:
            done = seq.request.prefill_only and seq.computed >= seq.goal
            return "", Finish(FinishReason.LENGTH) if done else None
        if seq.prefilled is None:
            seq.prefilled = now
        if seq.first_token is None:
            seq.first_token = now
        before = seq.generated
        tokens = (*proposal.tokens[: verdict.accepted], verdict.next_token)
        result = append_tokens(seq, tokens, self._context_limit)
        if seq.rules is not None:
            seq.rules.advance(seq.tokens[len(seq.request.prompt) + before :])
        count_drafts(seq, proposal, verdict, seq.generated - before)
        return result

    def _end(
        self,
        seq: Sequence,
        finish: Finish,
        now: float,
        last: TokenChunk | None = None,
    ) -> TokenChunk:
        """The only way out: give back everything and make the terminal chunk, with the output in
        `last`."""
        request = seq.request
        last = last or TokenChunk(request.id, seq.generated, (), "")
        text = last.text + closing_text(seq, finish)
        seq.finish = account(seq, finish, now)
        del self._live[request.id]
        self._samples.discard(seq)
        self._deadlines.discard(request.id, request.deadline)
        self.pool.release(seq.table)
        if seq in self.running:
            self.running.remove(seq)
        else:
            self._unwait(seq)
        return replace(last, text=text, finish=seq.finish)

    def check(self) -> None:
        """Assert the laws of blocks and cursors; cheap enough for every step of a test."""
        self.pool.check([s.table for s in self._live.values()])
        assert len(self.running) + self.waiting == len(self._live)
        for seq in self.running:
            assert 0 <= seq.drafted <= seq.computed < len(seq.tokens)
            assert seq.table.capacity >= seq.computed


def _work(seq: Sequence, count: int) -> Work:
    samples = seq.computed + count == len(seq.tokens)
    return Work(seq, seq.computed, count, 0, samples)
