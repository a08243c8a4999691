"""What the draft setting says: `none`, `auto`, or, with commas between them, any of `ngram`,
`suffix`, `table:DIR` and `model:ID`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.errors import ConfigError

AUTO = "ngram"
PLAIN = ("ngram", "suffix")  # kinds that take no more than their name


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One source: its kind, and which model, or the directory of which table."""

    kind: str
    model: str = ""
    directory: str = ""

    def __str__(self) -> str:
        what = self.model or self.directory
        return f"{self.kind}:{what}" if what else self.kind


def parse_drafts(setting: str) -> tuple[DraftSpec, ...]:
    """Sources in order of preference. Raises ConfigError for what is not known."""
    specs: list[DraftSpec] = []
    for part in (AUTO if setting.strip() == "auto" else setting).split(","):
        kind, _, what = part.strip().partition(":")
        if kind == "none" and setting.strip() == "none":
            return ()
        if kind in PLAIN and not what:
            specs.append(DraftSpec(kind))
        elif kind == "table" and what:
            specs.append(DraftSpec(kind, directory=what))
        elif kind == "model" and what:
            specs.append(DraftSpec(kind, model=what))
        else:
            raise ConfigError(
                f"unknown draft source {part.strip()!r}; "
                "use none, auto, ngram, suffix, table:DIR or model:ID"
            )
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
