"""A model of quantised weights is, bit for bit, the same model with these weights in bfloat16."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.build import Built, build
from engine.config import EngineConfig
from engine.convert import convert_gguf
from engine.errors import ConfigError, ModelError
from engine.outcome import Logprobs
from engine.quantised import MADE, quantise, save_native
from engine.request import OutputParams, Request, SamplingParams, StopParams
from tests.engine.model_files import model, tokenizer, write_directory, write_gguf

SCALE = 0.3  # larger weights make chaos of rounding
KINDS = {"": "Q4_1", "attn_v": "Q8_0", "ffn_down": "Q5_0", "token_embd": "Q8_0", "output": "Q5_1"}


def built(directory: Path, **settings: str) -> Built:
    config = EngineConfig(
        model=str(directory),
        dtype=settings.pop("dtype", "bfloat16"),
        kv_cache_mib=4,
        draft="ngram",
        **settings,  # type: ignore[arg-type]
    )
    return build(config, time.monotonic)


def outputs(one: Built) -> dict[str, list[tuple[int, Logprobs]]]:
    """Tokens and their logprobs, of long and short prompts at once, greedy and not."""
    for i in range(12):
        prompt = tuple((7 * i + j) % 290 + 3 for j in range(1 + 5 * i))
        sampling = SamplingParams(i % 3 * 0.7, seed=i)
        output = OutputParams(logprobs=3)
        one.engine.submit(Request(str(i), prompt, StopParams(20), sampling, output=output))
    found: dict[str, list[tuple[int, Logprobs]]] = {}
    while one.engine.busy:
        for chunk in one.engine.step():
            assert chunk.finish is None or not chunk.finish.error
            pairs = zip(chunk.tokens, chunk.logprobs, strict=True)
            found.setdefault(chunk.request_id, []).extend(pairs)
    return found


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def ready(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a quantised file; Llama's embedding is its head, too."""
    folder = tmp_path_factory.mktemp("quantised")
    source = model(request.param, rows=320, tied=request.param == "llama", hidden=64, scale=SCALE)
    convert_gguf(write_gguf(folder / "q.gguf", source, tokenizer(), kinds=KINDS), folder / "out")
    return folder / "out"


def test_native_weights_give_the_bits_of_the_model_that_was_made_of_them(ready: Path) -> None:
    plain, native = built(ready), built(ready, weights="native")
    assert native.info.fingerprint == plain.info.fingerprint
    assert native.info.strict
    found = outputs(native)
    assert found == outputs(plain)
    assert len(found) == 12
    assert len({ids[0][0] for ids in found.values()}) > 6  # a model that says something


@pytest.mark.parametrize("kind", MADE)
def test_weights_quantised_on_load_give_the_bits_of_their_values(kind: str, tmp_path: Path) -> None:
    source = write_directory(tmp_path / "source", hidden=64, scale=SCALE)
    values = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    before = values.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    quantise(values, kind)
    assert not torch.equal(values.state_dict()["model.layers.0.mlp.up_proj.weight"], before)
    widened = write_directory(tmp_path / "widened", hidden=64, scale=SCALE)
    values.save_pretrained(widened)
    own, right = built(source, weights=kind), built(widened)
    assert outputs(own) == outputs(right)
    assert own.info.fingerprint != built(source).info.fingerprint


def test_eight_bits_are_nearer_than_four() -> None:
    errors = {}
    for kind in MADE:
        own = model("llama", rows=320, tied=True, hidden=64, scale=SCALE).bfloat16()
        weight = own.model.layers[0].mlp.up_proj.weight
        before = weight.float().clone()
        quantise(own, kind)
        errors[kind] = float((weight.float() - before).norm() / before.norm())
    assert errors["q8"] < 0.01 < errors["q4"] < 0.2


def test_what_has_no_blocks_says_why(tmp_path: Path) -> None:
    """A directory that was no GGUF file, and a file of other formats."""
    directory = write_directory(tmp_path / "source", hidden=64, scale=SCALE)
    with pytest.raises(ModelError, match="was not made of a quantised GGUF file"):
        built(directory, weights="native")
    source = model("llama", rows=320, tied=True, hidden=64, scale=SCALE)
    file = write_gguf(tmp_path / "q.gguf", source, tokenizer(), kinds={"": "Q4_1", "attn_k": ""})
    convert_gguf(file, tmp_path / "out")
    with pytest.raises(ModelError, match=r"attn_k\.weight is F32"):
        built(tmp_path / "out", weights="native")


def test_a_file_that_does_not_say_what_became_of_it_is_not_native(tmp_path: Path) -> None:
    """Were rows ever ordered otherwise, or values widened otherwise, nothing would be written."""
    source = model("llama", rows=320, tied=True, hidden=64, scale=SCALE)
    file = write_gguf(tmp_path / "q.gguf", source, tokenizer(), kinds={"": "Q8_0"})
    changed = dict(source.bfloat16().named_parameters())
    why = save_native(file, changed, (4, 2), tmp_path / "native")
    assert why.endswith("is not what became of it")
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"weights": "native", "dtype": "float32"}, "weights native need dtype bfloat16"),
        ({"weights": "q8", "numerics": "fast"}, "quantised weights are not for LlamaForCausalLM"),
        ({"weights": "q3"}, "unknown weights 'q3'"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, str], named: str, ready: Path) -> None:
    if json.loads((ready / "config.json").read_text())["model_type"] != "llama":
        pytest.skip("once is enough")
    with pytest.raises((ConfigError, ModelError), match=named):
        built(ready, **settings)
