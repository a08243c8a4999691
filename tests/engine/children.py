"""A tiny model on disk, and clients with a real child process over it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path

import psutil

from engine.build import build
from engine.client import EngineState
from engine.config import EngineConfig
from engine.process import ProcessClient, Supervision
from engine.request import Request, SamplingParams, StopParams
from tests.engine.listener import RecordingListener
from tests.engine.tiny import tiny
from tests.engine.vocabularies import byte_level

ROWS, IDS, CONTEXT = 448, 420, 8192
KV_MIB, TOKENS_PER_MIB = 26, 2048
LONG = 3000  # tokens; many seconds of work, so that whatever happens happens in the middle
PROMPTS = ([50, 60, 70], [80] * 40, list(range(100, 117)), [9])
# Nothing here waits for the watchdog by accident; tests that want it put the clock forward.
PATIENT = Supervision(watchdog_s=60.0, stop_s=20.0, backoff_s=0.05, backoff_most_s=0.2)


def write_model(directory: Path, *, vocab_size: int = IDS, rows: int = ROWS, seed: int = 0) -> Path:
    """The embedding has more rows than the tokenizer has ids, as many models do."""
    model = tiny("llama", vocab=rows, seed=seed)
    model.config.max_position_embeddings = CONTEXT
    model.save_pretrained(directory)
    byte_level(vocab_size).save(str(directory / "tokenizer.json"))
    return directory


def config_of(directory: Path, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "model": str(directory),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "kv_cache_mib": KV_MIB,
        "draft": "ngram",
    }
    return EngineConfig(**{**settings, **changes})  # type: ignore[arg-type]


def request(name: str, prompt: Seq[int], tokens: int, seed: int | None = None) -> Request:
    """Endless unless `tokens` ends it: EOS is ignored."""
    sampling = SamplingParams(0.0) if seed is None else SamplingParams(0.8, top_p=0.9, seed=seed)
    return Request(name, tuple(prompt), StopParams(tokens), sampling, arrived=time.monotonic())


def reference(directory: Path, tokens: int) -> list[list[int]]:
    """What an engine in this process makes of the prompts, one by one."""
    engine = build(config_of(directory, draft="none"), time.monotonic).engine
    outputs = []
    for i, prompt in enumerate(PROMPTS):
        engine.submit(request("a", prompt, tokens, i or None))
        out: list[int] = []
        while engine.busy:
            for chunk in engine.step():
                out.extend(chunk.tokens)
        outputs.append(out)
    return outputs


class Clock:
    """Monotonic time that can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class World:
    """A client with a child, and what was heard from it."""

    def __init__(self, config: EngineConfig, rules: Supervision = PATIENT, **env: str) -> None:
        self.listener = RecordingListener()
        self.clock = Clock()
        self.client = ProcessClient(
            config, self.listener, rules, {**os.environ, **env}, clock=self.clock
        )
        self._names = 0

    @property
    def child(self) -> psutil.Process:
        assert self.client.pid is not None
        return psutil.Process(self.client.pid)

    def start(self) -> World:
        self.client.start()
        self.listener.wait_for_state(EngineState.READY)
        return self

    def submit(self, prompt: Seq[int], tokens: int, seed: int | None = None) -> str:
        self._names += 1
        name = f"r{self._names}"
        self.client.submit(request(name, prompt, tokens, seed))
        return name

    def outputs(self, tokens: int) -> list[list[int]]:
        """Ids of the prompts, all at once."""
        names = [self.submit(p, tokens, i or None) for i, p in enumerate(PROMPTS)]
        self.listener.wait_for_ends(names)
        return [self.listener.tokens(n) for n in names]

    def count(self, state: EngineState) -> int:
        """How often it was in this state so far."""
        return sum(s is state for s, _, _ in self.listener.states)

    def pass_time_until(self, state: EngineState, times: int = 1) -> None:
        """Again and again: what the child said before it hung comes first."""
        while self.count(state) < times:
            self.clock.ahead += 1000.0
            time.sleep(0.05)

    def load(self, count: int) -> list[str]:
        """Requests that take long, each of which has begun to speak."""
        names = [self.submit(PROMPTS[i % len(PROMPTS)], LONG, i) for i in range(count)]
        self.listener.wait(lambda: all(self.listener.chunks.get(n) for n in names))
        return names


@contextmanager
def running(config: EngineConfig, rules: Supervision = PATIENT, **env: str) -> Iterator[World]:
    world = World(config, rules, **env)
    try:
        yield world
    finally:
        world.client.stop()


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends within so long; a zombie has ended."""
    try:
        process = psutil.Process(pid)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        return True
    return False
