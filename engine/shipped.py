"""Sets of drafts that come with Draftwire, and which of them is a model's."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint import hash_weights, read_json, weight_files
from engine.errors import ModelError

SETS = Path(__file__).parent / "drafts"


def shipped_set(model: Path, sets: Path = SETS) -> Path | None:
    """The set that was made for the weights in the directory `model`, if there is one."""
    candidates = sorted(path.parent for path in sets.glob("*/draft.json"))
    if not candidates:
        return None
    try:
        own = hash_weights(model, weight_files(model))
        made_for = {read_json(path, "draft.json").get("weights_hash"): path for path in candidates}
    except ModelError:  # whoever loads the model says so
        return None
    return made_for.get(own)
