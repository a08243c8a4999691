"""What the draft setting says: `none`, `ngram`, `model:ID`, `auto`, or several with commas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.errors import ConfigError

AUTO = "ngram"


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One source: its kind and, for a model, which."""

    kind: str
    model: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.model}" if self.model else self.kind


def parse_drafts(setting: str) -> tuple[DraftSpec, ...]:
    """Sources in order of preference. Raises ConfigError for what is not known."""
    specs: list[DraftSpec] = []
    for part in (AUTO if setting.strip() == "auto" else setting).split(","):
        kind, _, model = part.strip().partition(":")
        if kind == "none" and setting.strip() == "none":
            return ()
        if (kind == "ngram" and not model) or (kind == "model" and model):
            specs.append(DraftSpec(kind, model))
        else:
            raise ConfigError(f"unknown draft source {part.strip()!r}; use none, ngram or model:ID")
    if len({s.kind for s in specs}) < len(specs):
        raise ConfigError(f"a kind of draft source is named twice in {setting!r}")
    return tuple(specs)


def resolve_models(config: EngineConfig, directory_of: Callable[[str], str]) -> EngineConfig:
    """`config` with every model reference replaced by its directory; the name is kept."""
    drafts = [
        replace(spec, model=directory_of(spec.model)) if spec.model else spec
        for spec in parse_drafts(config.draft)
    ]
    return replace(
        config,
        model=directory_of(config.model),
        model_name=config.model_name or config.model,
        draft=",".join(map(str, drafts)) or "none",
    )
