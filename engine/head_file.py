"""The directory of a set of drafts that were made for a target, and its head.

`head.safetensors` has the parameters and the ids that it knows; the target's own rows are not among
them. `table` is a folder of `engine.ngram_table`. `draft.json` says for which target they are, and
how they were made.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import read_json
from engine.errors import ConfigError, ModelError
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

    def write(self, directory: Path) -> None:
        text = json.dumps(asdict(self), indent=1, sort_keys=True)
        (directory / ABOUT).write_text(text + "\n")


def tokenizer_hash(directory: Path) -> str:
    """SHA-256 of the model's tokenizer.json."""
    return hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()


def read_about(directory: Path, target: LoadedModel) -> About:
    """Raises ConfigError, saying what differs, for drafts that are another target's."""
    try:
        about = About(**read_json(directory, ABOUT))
    except (ModelError, TypeError) as error:
        raise ConfigError(f"{directory} holds no set of drafts: {error}") from None
    own = About.of(target, about.vocabulary, {})
    for name in ("format", "tokenizer_hash", "hidden_size", "weights_hash"):
        if getattr(about, name) != (wanted := getattr(own, name)):
            raise ConfigError(
                f"the drafts in {directory} are not for {target.directory}: their {name} is "
                f"{getattr(about, name)}, not {wanted}"
            )
    return about


def save_head(module: HeadModule, directory: Path) -> None:
    """Its own parameters in bfloat16, whatever they are trained in."""
    state = {n: t.detach().bfloat16().contiguous() for n, t in module.own_state().items()}
    state[VOCABULARY] = module.vocabulary.int()
    save_file(state, directory / WEIGHTS)


def load_head(directory: Path, target: LoadedModel) -> HeadModule:
    """A head for `target`, in its dtype, with its rows for the ids that the head knows: to be
    called before the target is packed. Raises ConfigError."""
    about = read_about(directory, target)
    path = directory / WEIGHTS
    try:
        state = load_file(path)
        vocabulary: Tensor = state.pop(VOCABULARY).long()
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{path} is not a head: {error}") from None
    known = 0 < len(vocabulary) == about.vocabulary and int(vocabulary.min()) >= 0
    if not known or int(vocabulary.max()) >= target.vocab_size:
        raise ConfigError(f"{path} is not a head: its ids are not the target's")
    module = make_head(target, vocabulary)
    own = module.own_state()
    if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in own.items()}:
        raise ConfigError(f"{path} is not a head of a {target.architecture} like this")
    module.load_state_dict(state, strict=False)
    return module.requires_grad_(False).eval()


def make_head(target: LoadedModel, vocabulary: Tensor) -> HeadModule:
    """A head with the target's rows for these ids, its other parameters at random, in the target's
    dtype."""
    module = HeadModule(type(target.model), target.model.config, vocabulary)
    module = module.to(target.model.device, target.model.dtype)
    rows = target.model.get_output_embeddings()
    module.lm.lm_head.weight.data = rows.weight.detach()[vocabulary].clone()
    if rows.bias is not None:
        module.lm.lm_head.bias.data = rows.bias.detach()[vocabulary].clone()
    return module
