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
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from engine.errors import InvalidRequest
from engine.types import GrammarParams, Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Against memory that grows with the output; the library's own limits on time stand.
MOST_STATES = 50_000

Key = tuple[str, str]


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
        most_items: int = 50_000,
        kept: int = 64,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._most_items = most_items
        self._most_kept = kept
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Key, LLMatcher] = OrderedDict()
        self._keeping = threading.Lock()
        self._compiling = threading.Lock()
        self.ends = tuple(ends)

    def matcher(self, params: GrammarParams) -> LLMatcher:
        """At its beginning, to be copied. Raises InvalidRequest if it does not compile."""
        key = params.kind, params.text
        found = self._find(key)
        if found is None:
            with self._compiling:  # one at a time: they would take the engine's cores
                found = self._find(key) or self._compile(*key)
            with self._keeping:
                self._compiled[key] = found
                if len(self._compiled) > self._most_kept:
                    self._compiled.popitem(last=False)
        if found.is_error():
            raise InvalidRequest(f"the grammar does not compile: {first_line(found.get_error())}")
        return found

    def prepare(self, request: Request, then: Callable[[], None]) -> bool:
        """Whether `request` can be taken at once. If not, its grammar is compiled meanwhile, and
        `then` called from another thread."""
        params = request.grammar
        if params is None or self._find((params.kind, params.text)) is not None:
            return True

        def work() -> None:
            try:
                self.matcher(params)
            except InvalidRequest:
                pass  # it is told when the request is taken
            finally:
                then()

        threading.Thread(target=work, name="grammar", daemon=True).start()
        return False

    def _find(self, key: Key) -> LLMatcher | None:
        with self._keeping:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
        return found

    def _compile(self, kind: str, text: str) -> LLMatcher:
        """In an error state if it does not."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if self._vocabulary is None:
            self._vocabulary = LLTokenizer(
                self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=list(self.ends)
            )
        limits = LLParserLimits(
            max_lexer_states=MOST_STATES, step_max_items=self._most_items, verbose_errors=False
        )
        return LLMatcher(self._vocabulary, source(kind, text), log_level=0, limits=limits)


def source(kind: str, text: str) -> str:
    """The grammar in llguidance's own form. Raises InvalidRequest for a schema that is no JSON
    object, or a kind that is not known."""
    from llguidance import LLMatcher

    match kind:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(
                    text, defaults={"whitespace_flexible": False}
                )
            except ValueError as error:
                cause = first_line(str(error))
                raise InvalidRequest(f"the schema is no JSON object: {cause}") from error
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "lark":
            return LLMatcher.grammar_from_lark(text)
        case _:
            raise InvalidRequest(f"unknown kind of grammar {kind!r}")


def first_line(text: str) -> str:
    """Of a message that goes on with the grammar or the parser's state."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""
