"""The grammar of a request: what its fields say, and whether it compiles.

Grammars are compiled before admission, so that a bad one is INVALID_ARGUMENT and nobody else waits
for it: by a process of its own (`engine.grammar_check`), started by the first grammar that comes,
and killed where one takes too long. What was found about a grammar is remembered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path

import engine
from engine.request import GrammarParams
from engine.types import ModelInfo
from service.checks import Violations
from service.pb import draftwire_pb2 as pb
from service.status import ENGINE_RETRY_S, Reason, invalid, refused

MOST_BYTES = 65536
MOST_OPTIONS = 1024
MOST_REMEMBERED = 1024
MOST_WAITING = 32
LINE = 1 << 20  # longer than any answer
CHECKER = (sys.executable, "-P", "-m", "engine.grammar_check")


def parse_grammar(
    params: pb.GenerationParams, info: ModelInfo, found: Violations
) -> tuple[str, GrammarParams | None]:
    """The field that brings it, and the grammar if there is one and its fields are sound."""
    if not params.HasField("grammar"):
        return "", None
    grammar, kind = params.grammar, params.grammar.WhichOneof("kind")
    found.need(bool(info.eos_ids), "grammar", "the model has no end-of-sequence token to end with")
    if kind is None:
        found.need(False, "grammar", "one of json_schema, regex, choice and lark is required")
        return "grammar", None
    field, longest = f"grammar.{kind}", params.stopping.ignore_eos
    if kind == "choice":
        if not _check_options(grammar.choice.options, f"{field}.options", found):
            return field, None
        return field, GrammarParams("lark", _one_of(grammar.choice.options), longest)
    text = getattr(grammar, kind)
    if not found.need(bool(text), field, "must not be empty"):
        return field, None
    _check_size(len(text.encode()), field, found)
    return field, GrammarParams(kind, text, longest)


def _check_options(options: Seq[str], field: str, found: Violations) -> bool:
    if not found.need(
        1 <= len(options) <= MOST_OPTIONS,
        field,
        f"must have 1 to {MOST_OPTIONS} entries, got {len(options)}",
    ):
        return False
    filled = [
        found.need(bool(option), f"{field}[{index}]", "must not be empty")
        for index, option in enumerate(options)
    ]
    return _check_size(sum(len(option.encode()) for option in options), field, found) and all(
        filled
    )


def _check_size(size: int, field: str, found: Violations) -> bool:
    return found.need(size <= MOST_BYTES, field, f"{size} bytes are over the limit of {MOST_BYTES}")


def _one_of(options: Seq[str]) -> str:
    """In Lark, whose strings are those of JSON."""
    return "start: " + " | ".join(map(json.dumps, dict.fromkeys(options)))


class GrammarChecks:
    """Finds out whether grammars compile. Event loop only.

    One at a time, within `compile_s`; `start_s` for the process to be ready.
    """

    def __init__(
        self, command: Seq[str] = CHECKER, compile_s: float = 2.0, start_s: float = 60.0
    ) -> None:
        self._command = tuple(command)
        self._compile_s = compile_s
        self._start_s = start_s
        self._known: OrderedDict[tuple[str, str, bytes], str] = OrderedDict()
        self._turn = asyncio.Lock()
        self._asking: set[asyncio.Task[str]] = set()
        self._process: Process | None = None
        self._directory = ""

    async def check(self, grammar: GrammarParams, path: str, info: ModelInfo) -> None:
        """Raises Refused, naming the field `path`, unless it compiles."""
        key = info.directory, grammar.kind, hashlib.sha256(grammar.text.encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            wrong = self._known[key]
        elif len(self._asking) >= MOST_WAITING:
            raise refused(
                Reason.QUEUE_FULL,
                f"{MOST_WAITING} new grammars are waiting to be compiled",
                retry_after_s=ENGINE_RETRY_S,
                quota="grammars",
            )
        else:
            task = asyncio.ensure_future(self._ask(key, grammar, info))
            self._asking.add(task)
            task.add_done_callback(self._asked)
            # Shielded: if the caller goes, the answer must not be taken for that to the next one.
            wrong = await asyncio.shield(task)
        if wrong:
            raise invalid([(path, wrong)])

    def _asked(self, task: asyncio.Task[str]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits gets it; nobody may be left

    async def close(self) -> None:
        """End the process; nothing is checked afterwards."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._kill()

    async def _ask(
        self, key: tuple[str, str, bytes], grammar: GrammarParams, info: ModelInfo
    ) -> str:
        async with self._turn:
            if key in self._known:
                return self._known[key]
            await self._start(info)
            try:
                wrong = await self._answer([grammar.kind, grammar.text], self._compile_s)
            except TimeoutError:
                await self._kill()
                return f"takes longer than {self._compile_s:g} s to compile"
            except OSError:
                await self._kill()
                return "cannot be compiled: it takes too much memory"
            self._known[key] = wrong
            if len(self._known) > MOST_REMEMBERED:
                self._known.popitem(last=False)
            return wrong

    async def _start(self, info: ModelInfo) -> None:
        if self._process is not None and self._directory == info.directory:
            return
        await self._kill()
        root = Path(engine.__file__).parent.parent
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *(info.directory, str(info.vocab_size), *map(str, info.eos_ids)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=LINE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._directory = info.directory
        try:
            await self._answer(None, self._start_s)
        except OSError as error:  # a timeout is one, too
            await self._kill()
            raise RuntimeError("the process that compiles grammars does not start") from error

    async def _answer(self, question: list[str] | None, timeout_s: float) -> str:
        """Raises TimeoutError, or another OSError if the process has ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(timeout_s):
            if question is not None:
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise BrokenPipeError("the process has ended")
        answer: str = json.loads(line)
        return answer

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
