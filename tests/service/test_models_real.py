"""The supplied models themselves: fetched if they are not here, loaded, and making sense."""

from __future__ import annotations

import time

import pytest
import torch

from engine.loader import LoadedModel, check_same_vocabulary, load
from service.models import resolve
from service.models.catalogue import find

pytestmark = pytest.mark.model


def continuation(loaded: LoadedModel, prompt: str, tokens: int) -> str:
    ids = torch.tensor([loaded.tokenizer.encode(prompt).ids])
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    text: str = loaded.tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=False)
    return text


@pytest.mark.timeout(600)
def test_default_model() -> None:
    directory = resolve("smollm2-135m")
    load(directory)  # imports the model's own modules
    started = time.monotonic()
    loaded = load(directory)
    assert time.monotonic() - started < 2
    assert (loaded.eos_ids, loaded.vocab_size, loaded.context_limit) == ((2, 0), 49152, 8192)
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert "Paris" in continuation(loaded, chat, 12)
    # as the publisher's tokenizer has it: digits by themselves, indentation in one piece
    assert loaded.tokenizer.encode("x =  12\n    3").tokens == [
        *("x", "Ġ=", "ĠĠ", "1", "2", "ĊĠĠĠĠ", "3")
    ]
    used = sum(file.stat().st_size for file in directory.iterdir())
    assert used <= find("smollm2-135m").ready_size


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_coder_and_its_draft_model() -> None:
    target, draft = (resolve(name) for name in ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"))
    assert check_same_vocabulary(target, draft) == 151665
    for directory in (draft, target):
        loaded = load(directory)
        assert loaded.eos_ids == (151645, 151643)
        assert loaded.vocab_size == 151665
        before, after = "def add(a, b):\n    return", "\n\nprint(add(1, 2))\n"
        fim = f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"
        assert continuation(loaded, fim, 8).startswith(" a + b")
