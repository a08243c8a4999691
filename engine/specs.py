"""What the draft setting says: `none`, `auto`, or, with commas between them, any of `ngram`,
`suffix`, `table:DIR`, `head:DIR` and `model:ID`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.shipped import shipped_set

AUTO = "ngram,suffix"
PLAIN = ("ngram", "suffix")  # kinds that take no more than their name
KEPT = ("table", "head")  # in a directory


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
        elif kind in KEPT and what:
            specs.append(DraftSpec(kind, directory=str(Path(what).expanduser())))
        elif kind == "model" and what:
            specs.append(DraftSpec(kind, model=what))
        else:
            raise ConfigError(
                f"unknown draft source {part.strip()!r}; "
                "use none, auto, ngram, suffix, table:DIR, head:DIR or model:ID"
            )
    if len({s.kind for s in specs}) < len(specs):
        raise ConfigError(f"a kind of draft source is named twice in {setting!r}")
    if {"head", "model"} <= {s.kind for s in specs}:
        raise ConfigError("head and model are both named, and there is one draft KV")
    return tuple(specs)


def resolve_models(
    config: EngineConfig,
    directory_of: Callable[[str], str],
    shipped: Callable[[Path], Path | None] = shipped_set,
) -> EngineConfig:
    """`config` with every model reference replaced by its directory; the name is kept. Drafts are
    also those that were made for the model, where they are automatic and some came along."""
    model = directory_of(config.model)
    setting = config.draft
    if setting.strip() == "auto" and (found := shipped(Path(model))) is not None:
        setting = f"{AUTO},table:{found},head:{found}"
    drafts = [
        replace(spec, model=directory_of(spec.model)) if spec.model else spec
        for spec in parse_drafts(setting)
    ]
    return replace(
        config,
        model=model,
        model_name=config.model_name or config.model,
        draft=",".join(map(str, drafts)) or "none",
    )
