"""What a GGUF file says besides its tensors: checks, end-of-text ids and tokenizer repairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The metadata parser of the pinned transformers: seconds faster than `gguf.GGUFReader`, which
# makes several numpy arrays of every token.
from transformers.integrations.gguf.reader import read_gguf_metadata

from engine.errors import ModelError

CONTROL, UNUSED = 3, 5  # token types of GGUF
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a text or a turn, whatever the metadata names as the one EOS.
END_TOKENS = {
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"),
    *("<end_of_turn>", "</s>"),
}
# Pre-tokenizers that split off every digit by itself before anything else.
DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "command-r"})


class GGUFFile:
    """The metadata of a file that transformers can turn into a dense model.

    Raises ModelError for a file that is no GGUF, or that says something about the model which
    would be lost on the way, so that the result would be a subtly different model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            arrays = ("tokenizer.ggml.tokens",)
            self.metadata, self.tensors = read_gguf_metadata(str(path), arrays)
        except Exception as error:  # whatever parsing stumbles over in a broken file
            raise ModelError(f"{path} cannot be read as GGUF: {error}") from error
        self._refuse_what_would_be_lost()

    def _refuse_what_would_be_lost(self) -> None:
        architecture = self.metadata["general.architecture"]
        scaling = self.metadata.get(f"{architecture}.rope.scaling.type", "none")
        lost = [t for t in self.tensors if t.startswith(("rope_freqs", "rope_factors"))]
        if scaling != "none" and architecture != "gpt-oss":
            lost.append(f"rope scaling {scaling}")
        if f"{architecture}.attention.sliding_window" in self.metadata and not (
            architecture.startswith(("gemma", "gpt-oss"))
        ):
            lost.append("sliding_window")
        if lost:
            raise ModelError(
                f"{self.path}: {', '.join(lost)} would be lost in conversion; "
                "use the publisher's safetensors directory instead"
            )

    @property
    def _tokens(self) -> list[tuple[str, int]]:
        tokens = self._tokenizer("tokens", [])
        return list(zip(tokens, self._tokenizer("token_type", [1] * len(tokens)), strict=True))

    def _tokenizer(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    @property
    def eos_ids(self) -> list[int]:
        """Every id that ends a text, the one that the file calls EOS first."""
        named = [i for key in END_KEYS if (i := self._tokenizer(key)) is not None]
        known = [
            i for i, (t, kind) in enumerate(self._tokens) if kind == CONTROL and t in END_TOKENS
        ]
        return list(dict.fromkeys([*named, *known]))

    @property
    def context_length(self) -> int:
        return int(self.metadata[f"{self.metadata['general.architecture']}.context_length"])

    @property
    def used_tokens(self) -> int:
        """Number of ids without the padding that makes the vocabulary a round number."""
        kinds = [kind for _, kind in self._tokens]
        while kinds and kinds[-1] == UNUSED:
            kinds.pop()
        return len(kinds)

    def repair_tokenizer(self, path: Path) -> None:
        """Make tokenizer.json what the publisher's is: no padding tokens, digits split off."""
        tokenizer = json.loads(path.read_bytes())
        tokenizer["model"]["vocab"] = self._without_padding(tokenizer["model"]["vocab"])
        before = tokenizer["pre_tokenizer"]
        if self._tokenizer("pre") in DIGIT_SPLITTERS and before["type"] != "Sequence":
            digits = {"type": "Digits", "individual_digits": True}
            tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, before]}
        path.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1), encoding="utf-8")

    def _without_padding(self, vocab: Any) -> Any:
        if not isinstance(vocab, Mapping):  # a unigram model's is a list, and has none
            return vocab
        used = self.used_tokens
        return {token: i for token, i in vocab.items() if i < used}
