"""The comparison of `make fidelity` over tiny models, small enough for every test run."""

from __future__ import annotations

import random
import time
from pathlib import Path

from engine.convert import truncate_layers
from engine.pooled import load_models
from engine.request import Request, SamplingParams, StopParams
from tests.engine.children import IDS, config_of, write_model
from tests.fidelity.judge import Row
from tests.fidelity.prompts import RULES, SAMPLINGS, ruled
from tests.fidelity.settings import SETTINGS, Setting
from tests.fidelity.suite import Suite, share_of

REQUESTS, SHARE = 24, 12
IN_PROCESS = tuple(s for s in SETTINGS if not s.restart)


def named(name: str) -> Setting:
    return next(s for s in SETTINGS if s.name == name)


def tiny_requests() -> list[Request]:
    """Prompts of 1 to 80 random ids, some of them full blocks and some alike in the beginning."""
    rng = random.Random(1)
    common = [rng.randrange(3, IDS) for _ in range(48)]
    requests = []
    for i in range(REQUESTS):
        own = [rng.randrange(3, IDS) for _ in range(rng.choice([1, 7, 16, 30, 32, 50]))]
        prompt = common[: rng.choice([16, 40, 48])] + own if i % 3 == 0 else own
        drawn = SAMPLINGS[i // 2 % len(SAMPLINGS)] if i % 2 else SamplingParams(0.0)
        sampling = SamplingParams(
            drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p, seed=1000 + i
        )
        stopping = StopParams(rng.randint(12, 30))
        plain = Request(f"r{i}", tuple(prompt), stopping, sampling, arrived=float(i))
        requests.append(ruled(plain, i, RULES))
    return requests


def write_models(directory: Path) -> Path:
    """A target, and its first layer as a draft beside it."""
    write_model(directory / "target")
    truncate_layers(directory / "target", directory / "draft", 1)
    return directory


class TinySuite:
    """A `Suite` over the models in `directory`, with references for what is run."""

    def __init__(self, directory: Path, share: int = SHARE, **changes: object) -> None:
        self.config = config_of(
            directory / "target",
            draft=f"model:{directory / 'draft'}",
            cache_dir=str(directory / "checks"),
            **changes,
        )
        self.requests = tiny_requests()
        self._share = share
        models = load_models(self.config, time.monotonic)
        self.suite = Suite(self.config, models, self.requests, seed=0)

    def share(self, setting: Setting) -> list[Request]:
        share = share_of(setting, self.requests, 0, self._share)
        self.suite.references(share)
        return share

    def run(self, setting: Setting) -> Row:
        self.share(setting)
        return self.suite.run(setting, self._share)
