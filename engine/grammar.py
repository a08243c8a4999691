"""Grammars for structured output, compiled by llguidance (github.com/guidance-ai/llguidance).

A grammar is compiled once, for one vocabulary, outside the interpreter lock and never on the
engine's own thread (`Grammars.prepare`); a sequence then takes a copy, which costs microseconds.
Whether a grammar compiles, and how long that takes, has been found out before a request comes here
(`engine.grammar_check`). The library is loaded by the first request that needs it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from engine.errors import InvalidRequest
from engine.request import GrammarParams, Request
from engine.schema import DEFAULTS, OVERRIDES, sound
from engine.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Against memory that grows with the output; the library's own limits on time stand.
MOST_STATES = 50_000

# Processor seconds that a mask may take, once it is more than the first few use to: it is made in
# the middle of a step, for which all others wait.
MOST_MASK_S = 0.1
TOO_SLOW = "the grammar takes too long for a token: it can be read in too many ways"

Key = tuple[str, str]


@dataclass(slots=True)
class Pace:
    """Whether the masks of a grammar have turned out to be too slow; shared by all who use it."""

    too_slow: bool = False


class Grammars:
    """Compiled grammars over one vocabulary. Thread-safe.

    `ends` are the tokens that end an output. `most_items`: of the parser, for one token. The last
    `kept` are kept; a big one takes some megabytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        ends: Seq[int],
        most_items: int = 5_000,
        kept: int = 64,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._most_items = most_items
        self._most_kept = kept
        self._vocabulary: LLTokenizer | None = None
        self._bytes: TokenBytes | str | None = None  # or what is wrong
        self._compiled: OrderedDict[Key, LLMatcher | str] = OrderedDict()  # or what is wrong
        self._paces: OrderedDict[Key, Pace] = OrderedDict()
        self._keeping = threading.Lock()
        self._compiling = threading.Lock()
        self.ends = tuple(ends)

    def matcher(self, params: GrammarParams) -> LLMatcher:
        """At its beginning, to be copied. Raises InvalidRequest if it does not compile."""
        key = params.kind, params.text
        found = self._find(key)
        if found is None:
            with self._compiling:  # one at a time: they would take the engine's cores
                found = self._find(key) or self._outcome(*key)
            with self._keeping:
                self._compiled[key] = found
                if len(self._compiled) > self._most_kept:
                    self._compiled.popitem(last=False)
        if isinstance(found, str):
            raise InvalidRequest(found)
        return found

    def pace(self, params: GrammarParams) -> Pace:
        """Of a grammar, for as long as it is kept."""
        with self._keeping:
            pace = self._paces.setdefault((params.kind, params.text), Pace())
            while len(self._paces) > self._most_kept:
                self._paces.popitem(last=False)
            return pace

    def token_bytes(self) -> TokenBytes:
        """Of the vocabulary. Raises InvalidRequest if the library cannot read it."""
        with self._compiling:
            if self._bytes is None:
                self._bytes = self._read_bytes()
        if isinstance(self._bytes, str):
            raise InvalidRequest(self._bytes)
        return self._bytes

    def prepare(self, request: Request, then: Callable[[], None]) -> bool:
        """Whether `request` can be taken at once. If not, its grammar is compiled meanwhile, and
        `then` called from another thread."""
        params = request.grammar
        compiled = params is None or self._find((params.kind, params.text)) is not None
        if compiled and (request.forced is None or self._bytes is not None):
            return True

        def work() -> None:
            with suppress(InvalidRequest):  # it is told when the request is taken
                if request.forced is not None:
                    self.token_bytes()
                if params is not None:
                    self.matcher(params)
            then()

        threading.Thread(target=work, name="grammar", daemon=True).start()
        return False

    def _find(self, key: Key) -> LLMatcher | str | None:
        with self._keeping:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
        return found

    def _outcome(self, kind: str, text: str) -> LLMatcher | str:
        try:
            return self._compile(source(kind, text))
        except Exception as error:  # a vocabulary that the library cannot read raises ValueError
            return first_line(str(error)) or type(error).__name__

    def _read_bytes(self) -> TokenBytes | str:
        try:
            vocabulary = self._load()
            return TokenBytes(
                b"" if vocabulary.is_special_token(i) else vocabulary.decode_bytes([i])
                for i in range(self._vocab_size)
            )
        except Exception as error:  # as above
            return f"the vocabulary has no bytes: {first_line(str(error))}"

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_lexer_states=MOST_STATES, step_max_items=self._most_items, verbose_errors=False
        )
        matcher = LLMatcher(self._load(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"the grammar does not compile: {first_line(matcher.get_error())}")
        return matcher

    def _load(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._vocabulary is None:
            self._vocabulary = LLTokenizer(
                self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=list(self.ends)
            )
        return self._vocabulary


def source(kind: str, text: str) -> str:
    """The grammar in llguidance's own form. Raises ValueError for a schema that is none or not
    supported, or a kind that is not known."""
    from llguidance import LLMatcher

    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                sound(text), defaults=DEFAULTS, overrides=OVERRIDES
            )
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "lark":
            if "%json" in text:
                raise ValueError("%json is not supported; json_schema takes a schema")
            return LLMatcher.grammar_from_lark(text)
        case _:
            raise ValueError(f"unknown kind of grammar {kind!r}")


def first_line(text: str) -> str:
    """Of a message that goes on with the grammar or the parser's state. What is wrong with a
    regular expression is said at the end of a picture of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    causes = [line for line in lines if line.startswith("error: ")]
    drawn = lines[0].endswith("regex parse error:") and causes
    return f"{lines[0]} {causes[0]}" if drawn else lines[0]
