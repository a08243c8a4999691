"""Loads a causal LM from a directory into memory, checked, or says in one line why it cannot.

Nothing here touches the network. Weights in the wanted dtype stay a memory map of the file, so
that loading costs no copy; whoever packs them makes the only one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.checkpoint import hash_weights, load_tokenizer, read_json, weight_files
from engine.errors import ConfigError, ModelError

CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: eval mode, no gradients.

    `vocab_size` is the number of ids that the tokenizer knows (highest + 1, added tokens
    included); the embedding may have more rows, and those ids must never be drawn.
    `eos_ids` are the ids that end a text, the main one first. `context_limit` is in tokens.
    `sliding_window` is the width of the window in tokens, where any layer has one.
    `weights_hash`: see `engine.checkpoint.hash_weights`.
    """

    model: PreTrainedModel
    config: Any
    tokenizer: Tokenizer
    directory: Path
    architecture: str
    eos_ids: tuple[int, ...]
    vocab_size: int
    context_limit: int
    sliding_window: int | None
    weights_hash: str


def load(
    directory: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    *,
    attn_implementation: str = "sdpa",
) -> LoadedModel:
    """Load the model in `directory` (config.json, safetensors, tokenizer.json).

    `dtype` is auto, bfloat16 or float32; `device` is auto, cpu or cuda[:N]. Raises ConfigError for
    a dtype or device that cannot be had, and ModelError, naming the file, for a bad directory.
    """
    directory = Path(directory)
    where = resolve_device(device)
    number_type = resolve_dtype(dtype, where)
    read_json(directory, "config.json")  # before anything slow
    weights = weight_files(directory)
    tokenizer = load_tokenizer(directory)
    with _quiet():
        model = _load_model(directory, number_type, where, attn_implementation)
    text_config = model.config.get_text_config()
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    rows = model.get_input_embeddings().num_embeddings
    if vocab_size > rows:
        raise ModelError(
            f"{directory}: tokenizer.json has {vocab_size} ids and the model {rows}; "
            "they do not belong together"
        )
    return LoadedModel(
        model=model,
        config=text_config,
        tokenizer=tokenizer,
        directory=directory,
        architecture=type(model).__name__,
        eos_ids=read_eos_ids(directory, tokenizer),
        vocab_size=vocab_size,
        context_limit=_context_limit(directory, text_config),
        sliding_window=getattr(text_config, "sliding_window", None),
        weights_hash=hash_weights(directory, weights),
    )


def resolve_device(name: str) -> torch.device:
    """auto is the first CUDA device, else the CPU. Raises ConfigError for one that is not there."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        built = "has no CUDA device" if torch.version.cuda else "has a torch built without CUDA"
        raise ConfigError(f"device {name}: this machine {built}; use device cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str, device: torch.device, cpu_info: Path = CPU_INFO) -> torch.dtype:
    """auto is bfloat16 where the device computes in it natively, else float32."""
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name == "auto":
        fast = device.type != "cpu" or bool(BF16_FLAGS & _cpu_flags(cpu_info))
        return torch.bfloat16 if fast else torch.float32
    if name not in known:
        raise ConfigError(f"unknown dtype {name!r}; use auto, bfloat16 or float32")
    return known[name]


def read_eos_ids(directory: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the tokenizer's eos_token."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(directory, name, optional=True).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    token = read_json(directory, "tokenizer_config.json", optional=True).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    found = tokenizer.token_to_id(text) if text else None
    return () if found is None else (found,)


def check_same_vocabulary(target: str | Path, draft: str | Path) -> int:
    """The number of ids that both directories' tokenizers give the same meaning, if it is all.

    Unequal padding of the embeddings does not matter. Raises ModelError otherwise, naming both
    sizes and the first token that differs.
    """
    ours, theirs = (_tokens_by_id(Path(d)) for d in (target, draft))
    if ours == theirs:
        return len(ours)
    pairs = zip(ours, theirs, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    a, b = (repr(t[first]) if first < len(t) else "nothing" for t in (ours, theirs))
    raise ModelError(
        f"draft {draft} ({len(theirs)} tokens) and target {target} ({len(ours)} tokens) have "
        f"different vocabularies: id {first} is {b} in the draft and {a} in the target"
    )


def _tokens_by_id(directory: Path) -> list[str | None]:
    vocabulary = load_tokenizer(directory).get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tokens


def _load_model(
    directory: Path, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, ImportError) as error:
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{directory} cannot be loaded: {cause}") from error
    if wrong := report["missing_keys"] or report["mismatched_keys"] or report["error_msgs"]:
        # transformers would fill the gaps with random numbers and go on
        raise ModelError(
            f"{directory}: {len(wrong)} weights are missing or of the wrong shape, "
            f"such as {next(iter(sorted(map(str, wrong))))}"
        )
    return model.eval().requires_grad_(False)


def _context_limit(directory: Path, config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelError(f"{directory}/config.json does not say max_position_embeddings")
    return limit


def _cpu_flags(cpu_info: Path) -> frozenset[str]:
    """What the first CPU can do, by the kernel's names; empty where the kernel does not tell."""
    if not cpu_info.exists():
        return frozenset()
    for line in cpu_info.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without progress bars and advice while a model loads."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.ERROR)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
