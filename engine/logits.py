"""Logits processing: what a request's parameters do to each row before a token is drawn from it.

The order, the same for every row, drafted or not: repetition, presence and frequency penalties,
bias, then what cannot be drawn (ends of the output before `min_tokens`, tokens that are not allowed
or are banned, the last token of a bad word), the grammar's mask, what the output must begin with,
typical-p. Temperature, top-k, top-p and min-p follow in the sampler. Each rule looks at one row and
at the tokens before it alone, in float32, so a row has the same bits in any company and after any
drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.forced import ForcedRule
from engine.grammar import Grammars
from engine.grammar_mask import GrammarMask
from engine.request import LogitParams, Request

NONE = LogitParams()


class LogitRule(Protocol):
    """One of the rules. `push` and `pop` keep what it knows of the output."""

    def edit(self, row: Tensor) -> None:
        """Change (vocabulary,) float32 in place."""
        ...

    def push(self, token: int) -> None:
        """The output goes on with `token`."""
        ...

    def pop(self) -> None:
        """It does not, after all."""
        ...


class Chain:
    """`LogitRules` of rules in order; among them may be those of a grammar and a forced text."""

    def __init__(
        self,
        rules: Seq[LogitRule],
        grammar: GrammarMask | None = None,
        text: ForcedRule | None = None,
    ) -> None:
        self._rules = tuple(rules)
        self._text = text
        self.grammar = grammar

    def forced(self, most: int) -> tuple[int, ...]:
        """See `engine.types.LogitRules`."""
        ahead = () if self._text is None else self._text.ahead(most)
        return ahead or (() if self.grammar is None else self.grammar.forced(most))

    def apply(self, logits: Tensor, drafts: Seq[int]) -> None:
        """See `engine.types.LogitRules`."""
        pushed = 0
        try:
            for row in range(len(drafts) + 1):
                for rule in self._rules:
                    rule.edit(logits[row])
                if row < len(drafts):
                    self.advance(drafts[row : row + 1])
                    pushed += 1
        finally:
            for _ in range(pushed):
                for rule in self._rules:
                    rule.pop()

    def advance(self, tokens: Seq[int]) -> None:
        """See `engine.types.LogitRules`."""
        for token in tokens:
            for rule in self._rules:
                rule.push(token)


def logit_rules(
    request: Request, vocab_size: int, grammars: Grammars | None = None
) -> Chain | None:
    """The rules that a request's parameters ask for; None if they ask for none.

    Raises InvalidRequest for a grammar that does not compile, or if there are no `grammars`.
    """
    params, stopping = request.sampling.logits, request.stopping
    bare = request.grammar is None and request.forced is None
    if params == NONE and not stopping.min_tokens and bare:
        return None
    rules = _before_grammar(request, vocab_size)
    grammar = _grammar(request, grammars)
    if grammar is not None:
        rules.append(grammar)
    text = _forced_text(request, grammars)
    if text is not None:
        rules.append(text)
    if params.typical_p < 1 and request.sampling.temperature > 0:
        rules.append(Typical(params.typical_p, request.sampling.temperature))
    return Chain(rules, grammar, text)


def _before_grammar(request: Request, vocab_size: int) -> list[LogitRule]:
    params, stopping = request.sampling.logits, request.stopping
    rules: list[LogitRule] = []
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if penalties != (1.0, 0.0, 0.0):
        rules.append(Penalties(*penalties, request.prompt, vocab_size))
    if params.bias:
        rules.append(Bias(params.bias))
    if stopping.min_tokens:
        rules.append(MinTokens(stopping.min_tokens, stopping.stop_ids | stopping.eos_ids))
    if params.allowed is not None or params.banned:
        rules.append(Bans(params.allowed, params.banned, vocab_size))
    if params.bad_words:
        rules.append(BadWords(params.bad_words))
    return rules


def _grammar(request: Request, grammars: Grammars | None) -> GrammarMask | None:
    params = request.grammar
    if params is None:
        return None
    if grammars is None:
        raise InvalidRequest("this engine has no grammars")
    matcher = grammars.matcher(params)
    return GrammarMask(matcher, grammars.ends, params.longest, grammars.pace(params))


def _forced_text(request: Request, grammars: Grammars | None) -> ForcedRule | None:
    if request.forced is None:
        return None
    if grammars is None:
        raise InvalidRequest("this engine has no texts of its tokens")
    return ForcedRule(request.forced, grammars.token_bytes())


class Stateless:
    """A rule that does not care what came before."""

    def push(self, token: int) -> None:
        return None

    def pop(self) -> None:
        return None


class Penalties:
    """Repetition (Keskar et al. 2019, "CTRL", section 4.1) for tokens of prompt and output,
    presence and frequency as in the OpenAI API, for tokens of the output."""

    def __init__(
        self,
        repetition: float,
        presence: float,
        frequency: float,
        prompt: Seq[int],
        vocab_size: int,
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        known = sorted(set(prompt)) if repetition != 1 else []
        self._place = {token: i for i, token in enumerate(known)}
        room = len(known) + 256
        self._ids = np.zeros(room, np.int64)
        self._ids[: len(known)] = known
        self._counts = np.zeros(room, np.float32)
        self._output: list[int] = []
        self._from_prompt = len(known)

    def edit(self, row: Tensor) -> None:
        used = len(self._place)
        ids = torch.from_numpy(self._ids[:used]).to(row.device)
        counts = torch.from_numpy(self._counts[:used]).to(row.device)
        x = row[ids]
        if self._repetition != 1:
            x = torch.where(x > 0, x / self._repetition, x * self._repetition)
        x -= counts * self._frequency + (counts > 0) * self._presence
        row[ids] = x

    def push(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._ids = np.append(self._ids, np.zeros_like(self._ids))
                self._counts = np.append(self._counts, np.zeros_like(self._counts))
            self._ids[place], self._counts[place] = token, 0
        self._counts[place] += 1
        self._output.append(token)

    def pop(self) -> None:
        token = self._output.pop()
        place = self._place[token]
        self._counts[place] -= 1
        # The last to come is the first to go: a token that only a draft brought is at the end.
        if place >= self._from_prompt and not self._counts[place]:
            del self._place[token]


class Bias(Stateless):
    """Adds to the logits of some tokens."""

    def __init__(self, bias: Seq[tuple[int, float]]) -> None:
        self._ids = torch.tensor([token for token, _ in bias])
        self._values = torch.tensor([value for _, value in bias], dtype=torch.float32)

    def edit(self, row: Tensor) -> None:
        ids = self._ids.to(row.device)
        row[ids] += self._values.to(row.device)


class MinTokens:
    """Nothing that ends the output, as long as it is too short."""

    def __init__(self, least: int, ends: frozenset[int]) -> None:
        self._left = least
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64)

    def edit(self, row: Tensor) -> None:
        if self._left > 0 and len(self._ends):
            row[self._ends.to(row.device)] = -math.inf

    def push(self, token: int) -> None:
        self._left -= 1

    def pop(self) -> None:
        self._left += 1


class Bans(Stateless):
    """Tokens that are never drawn."""

    def __init__(self, allowed: Seq[int] | None, banned: Seq[int], vocab_size: int) -> None:
        never = torch.zeros(vocab_size, dtype=torch.bool)
        if allowed is not None:
            never[:] = True
            never[torch.tensor(allowed, dtype=torch.int64)] = False
        never[torch.tensor(banned, dtype=torch.int64)] = True
        self._never = never

    def edit(self, row: Tensor) -> None:
        row.masked_fill_(self._never.to(row.device), -math.inf)


class BadWords:
    """The last token of a sequence that must not appear, where the others stand before it."""

    def __init__(self, words: Seq[tuple[int, ...]]) -> None:
        self._words = tuple(words)
        self._longest = max(map(len, words))
        self._output: list[int] = []

    def edit(self, row: Tensor) -> None:
        tail = self._output[-self._longest :]
        for *before, last in self._words:
            if not before or tail[-len(before) :] == before:
                row[last] = -math.inf

    def push(self, token: int) -> None:
        self._output.append(token)

    def pop(self) -> None:
        self._output.pop()


class Typical(Stateless):
    """Locally typical sampling (Meister et al. 2022, algorithm 1): the tokens whose surprise is
    nearest to what is expected, until their mass reaches `p`. Here before top-k, top-p and min-p,
    of the distribution at the request's temperature, in double. The lower id wins a tie."""

    def __init__(self, p: float, temperature: float) -> None:
        self._p, self._temperature = p, temperature

    def edit(self, row: Tensor) -> None:
        logs = (row.double() / self._temperature).log_softmax(0)
        mass = logs.exp()
        surprise = -torch.where(mass > 0, mass * logs, 0.0).sum()
        apart, order = (logs + surprise).abs().sort(stable=True)
        reached = torch.where(apart.isfinite(), mass[order], 0.0).cumsum(0)
        # Those after the first that reaches it go.
        gone = order[1:][reached[:-1] >= self._p]
        row[gone] = -math.inf
