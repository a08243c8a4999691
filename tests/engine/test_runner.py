"""A stock model over paged KV against the same model by transformers' own generate, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache

import pytest
import torch

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.core import Engine
from engine.draft import DraftSource
from engine.draft_choice import DraftChoice
from engine.draft_grammar import ForcedDraft, LegalDraft
from engine.draft_guard import GuardedDraft
from engine.draft_model import ModelDraft
from engine.draft_ngram import NgramDraft
from engine.draft_suffix import SuffixDraft
from engine.draft_table import TableDraft
from engine.grammar import Grammars
from engine.logits import logit_rules
from engine.ngram_table import NgramTable
from engine.outcome import TokenChunk
from engine.policy import ClassArrival
from engine.prefix import NoPrefixCache, PrefixCache
from engine.rejection import Independent, Rejection
from engine.request import Request, SamplingParams, StopParams
from engine.scheduler import Scheduler
from engine.step_costs import FREE, StepCosts
from tests.engine.fakes import JunkDraft, ManualClock, PlainText, RecordingObserver
from tests.engine.tiny import BLOCK, FAMILIES, VOCAB, paged, prompts, stock_greedy, tiny

NEAR_TIE = 1e-3


class TinyRig:
    """A whole engine over a tiny model; `drafts` as on the command line."""

    def __init__(
        self,
        family: str,
        drafts: str,
        *,
        num_blocks: int = 64,
        max_seqs: int = 16,
        rows: int = 40,
        drafted: int = 4,
        prefix_cache: bool = False,
        strict: bool = True,
        vocab: int = VOCAB,
        grammars: Grammars | None = None,
        rejection: bool = False,
        table: NgramTable | None = None,
    ) -> None:
        config = EngineConfig(
            max_draft_tokens=drafted, max_seqs=max_seqs, max_step_rows=rows, draft_rows=40
        )
        # None: coupled.
        own, guess = (Rejection(), Independent()) if rejection else (None, None)
        target = paged(
            tiny(family, vocab=vocab), num_blocks, strict=strict, vocab=vocab, sampler=own
        )
        caches = [target.cache]
        sources: list[DraftSource] = []
        free: dict[str, Callable[[], DraftSource]] = {
            "ngram": NgramDraft,
            "suffix": SuffixDraft,
            "table": lambda: TableDraft(table or NgramTable(vocab, [])),
            "grammar": ForcedDraft,
            "junk": lambda: JunkDraft(random.Random(3), vocab),
        }
        for kind in drafts.split(","):
            if kind in free:
                sources.append(free[kind]())
            elif kind in ("model", "perfect"):
                seed = 0 if kind == "perfect" else 1
                model = tiny(family, seed=seed, vocab=vocab)
                small = paged(model, num_blocks, vocab=vocab, sampler=guess)
                caches.append(small.cache)
                sources.append(ModelDraft(small, rows, 512))
        self.pool = BlockPool(num_blocks, BLOCK)
        self.observer = RecordingObserver()
        prefixes = PrefixCache(self.pool, b"key") if prefix_cache else NoPrefixCache()
        self.scheduler = Scheduler(
            config,
            self.pool,
            prefixes,
            ClassArrival(),
            lambda r: PlainText(),
            512,
            lambda r: logit_rules(r, vocab, grammars),
        )
        draft = DraftChoice(
            [LegalDraft(GuardedDraft(s, vocab)) for s in sources], costs=StepCosts(FREE)
        )

        def copy_blocks(pairs: Seq[tuple[int, int]]) -> None:
            for kv in caches:
                kv.copy_blocks(pairs)

        self.engine = Engine(
            self.scheduler, target, draft, copy_blocks, ManualClock(), self.observer
        )

    def generate(
        self, requests: Seq[Seq[int]], tokens: int, sampling: SamplingParams | None = None
    ) -> list[list[int]]:
        """All at once; output ids by request."""
        sampling = sampling or SamplingParams(temperature=0.0)
        return self.serve(
            [
                Request(str(i), tuple(prompt), StopParams(tokens), sampling, arrived=float(i))
                for i, prompt in enumerate(requests)
            ]
        )

    def serve(self, requests: Seq[Request]) -> list[list[int]]:
        """All at once; their ids count from 0. Output ids by request."""
        out: list[list[int]] = [[] for _ in requests]
        for name, chunks in self.chunks(requests).items():
            out[int(name)] = [token for chunk in chunks for token in chunk.tokens]
            assert not any(chunk.finish.error for chunk in chunks if chunk.finish is not None)
        assert self.pool.free == self.pool.num_blocks
        return out

    def chunks(self, requests: Seq[Request]) -> dict[str, list[TokenChunk]]:
        """All at once, to their ends; what came of each."""
        for request in requests:
            self.engine.submit(request)
        out: dict[str, list[TokenChunk]] = {request.id: [] for request in requests}
        for _ in range(20_000):
            for chunk in self.engine.step():
                out[chunk.request_id].append(chunk)
            if not self.engine.busy:
                return out
        raise AssertionError("livelock")


def gaps(family: str, prompt: Seq[int], output: Seq[int]) -> list[float]:
    """The stock model's top-2 logit gap at each output position."""
    model = tiny(family)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output]])
        logits = model(input_ids=ids, use_cache=False).logits[0]
    top = logits[len(prompt) - 1 : -1].topk(2).values
    return (top[:, 0] - top[:, 1]).tolist()


@cache
def wanted(family: str) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what transformers' own generate makes of each."""
    model = tiny(family)
    return [(prompt, stock_greedy(model, prompt, 40)) for prompt in prompts(10, random.Random(1))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafts", ["none", "ngram", "model", "perfect", "ngram,model"])
@pytest.mark.parametrize("strict", [True, False])
def test_greedy_equals_transformers(family: str, drafts: str, strict: bool) -> None:
    rig = TinyRig(family, drafts, num_blocks=24, strict=strict)
    got = rig.generate([p for p, _ in wanted(family)], 40)
    for (prompt, want), ids in zip(wanted(family), got, strict=True):
        if ids != want:
            first = next(i for i in range(40) if ids[i] != want[i])
            assert gaps(family, prompt, want)[first] < NEAR_TIE


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_perfect_draft_is_accepted_throughout(temperature: float) -> None:
    """Also after preemption (24 blocks are too few for all) and chunked prefill."""
    rig = TinyRig("llama", "perfect", num_blocks=24)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=7)
    rig.generate(prompts(12, random.Random(2)), 60, sampling)
    drafted = sum(r.drafted for r in rig.observer.reports)
    accepted = sum(r.accepted for r in rig.observer.reports)
    assert sum(r.preempted for r in rig.observer.reports) > 0
    assert accepted == drafted > 100
