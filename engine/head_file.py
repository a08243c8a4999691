"""The directory of a set of drafts that were made for a target, and its head.

`head.safetensors` has the parameters and the ids that it knows; the target's own rows are not among
them. `table` is a folder of `engine.ngram_table`. `draft.json` says for which target they are, and
how they were made.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import hash_weights, read_json, weight_files
from engine.errors import ConfigError, ModelError
from engine.fused import FAMILIES
from engine.head import HeadModule
from engine.loader import LoadedModel

FORMAT = 1
ABOUT, WEIGHTS, TABLE = "draft.json", "head.safetensors", "table"
VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class About:
    """What a set of drafts was made for and how. `weights_hash`: `LoadedModel`'s; `tokenizer_hash`:
    SHA-256 of tokenizer.json. `recipe` makes the same again, `scores` say how good it is."""

    weights_hash: str
    tokenizer_hash: str
    hidden_size: int
    vocabulary: int
    recipe: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @staticmethod
    def of(target: LoadedModel, vocabulary: int, recipe: dict[str, Any]) -> About:
        return About(
            target.weights_hash,
            tokenizer_hash(target.directory),
            target.config.hidden_size,
            vocabulary,
            recipe,
        )

    @staticmethod
    def of_directory(target: Path) -> About:
        """Without loading the target; what is made for it is left open. Raises ModelError."""
        hidden = read_json(target, "config.json").get("hidden_size", 0)
        weights = hash_weights(target, weight_files(target))
        return About(weights, tokenizer_hash(target), hidden, 0)

    def write(self, directory: Path) -> None:
        """At once or not at all."""
        partial = directory / f"{ABOUT}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")
        partial.replace(directory / ABOUT)


def tokenizer_hash(directory: Path) -> str:
    """SHA-256 of the model's tokenizer.json. Raises ModelError."""
    try:
        return hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    except OSError as error:
        raise ModelError(f"model {directory} has no tokenizer.json: {error}") from None


def read_about(directory: Path, target: LoadedModel) -> About:
    """Raises ConfigError, saying what differs, for drafts that are another target's."""
    return read_set(directory, About.of(target, 0, {}), target.directory)


def read_set(directory: Path, own: About, target: Path) -> About:
    """As `read_about`, for the target in a directory, of which `own` was made."""
    try:
        value = read_json(directory, ABOUT)
    except (ModelError, OSError) as error:
        raise ConfigError(f"{directory} holds no set of drafts: {error}") from None
    if set(value) != {f.name for f in fields(About)} or value["format"] != FORMAT:
        raise ConfigError(
            f"{directory} holds no set of drafts: {ABOUT} is not one of format {FORMAT}"
        )
    about = About(**value)
    for name in ("tokenizer_hash", "hidden_size", "weights_hash"):
        if getattr(about, name) != (wanted := getattr(own, name)):
            raise ConfigError(
                f"the drafts in {directory} are not for {target}: their {name} is "
                f"{getattr(about, name)!r}, not {wanted!r}"
            )
    return about


def check_family(architecture: str) -> None:
    """Raises ConfigError for a target that there is no head for."""
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"there are draft heads for {known}, not for {architecture}")


def save_head(module: HeadModule, directory: Path) -> None:
    """Its own parameters in bfloat16, whatever they are trained in; at once or not at all."""
    state = {n: t.detach().bfloat16().contiguous() for n, t in module.own_state().items()}
    state[VOCABULARY] = module.vocabulary.int()
    partial = directory / f"{WEIGHTS}.partial"
    save_file(state, partial)
    partial.replace(directory / WEIGHTS)


def load_head(directory: Path, target: LoadedModel) -> HeadModule:
    """A head for `target`, in its dtype, with its rows for the ids that the head knows: to be
    called before the target is packed. Raises ConfigError."""
    about = read_about(directory, target)
    path = directory / WEIGHTS
    try:
        state = load_file(path)
        ids: Tensor = state.pop(VOCABULARY)
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{path} is not a head: {error}") from None
    known = ids.dtype == torch.int32 and ids.ndim == 1 and 0 < len(ids) == about.vocabulary
    if not known or int(ids[0]) < 0 or int(ids[-1]) >= target.vocab_size or (ids.diff() < 1).any():
        raise ConfigError(f"{path} is not a head: its ids are not the target's, ascending")
    if not all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in state.values()):
        raise ConfigError(f"{path} is not a head: its weights are not all bfloat16 numbers")
    vocabulary = ids.long()
    module = make_head(target, vocabulary)
    own = module.own_state()
    if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in own.items()}:
        raise ConfigError(f"{path} is not a head of a {target.architecture} like this")
    module.load_state_dict(state, strict=False)
    return module.requires_grad_(False).eval()


def make_head(target: LoadedModel, vocabulary: Tensor) -> HeadModule:
    """A head with the target's rows for these ids, its other parameters at random, in the target's
    dtype. Raises ConfigError for a target that there is no head for."""
    check_family(target.architecture)
    module = HeadModule(type(target.model), target.model.config, vocabulary)
    module = module.to(target.model.device, target.model.dtype)
    rows = target.model.get_output_embeddings()
    module.lm.lm_head.weight.data = rows.weight.detach()[vocabulary].clone()
    if rows.bias is not None:
        module.lm.lm_head.bias.data = rows.bias.detach()[vocabulary].clone()
    return module
