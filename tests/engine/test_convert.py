"""GGUF files and incomplete directories become ready directories, exactly or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from engine.convert import complete_directory, convert_gguf, main, truncate_layers
from engine.errors import ModelError
from engine.loader import load
from tests.engine import model_files
from tests.engine.model_files import TEXT, model, tokenizer, write_directory, write_gguf

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "tiny.gguf", model("llama", rows=320, tied=True), tokenizer())


@pytest.fixture(scope="module")
def ready(llama_file: Path) -> Path:
    out = llama_file.parent / "ready"
    convert_gguf(llama_file, out)
    return out


def test_every_weight_is_the_files_bit_for_bit(ready: Path) -> None:
    expected = model("llama", rows=320, tied=True).state_dict()
    tensors = load_file(ready / "model.safetensors")
    assert tensors.keys() == expected.keys() - {"lm_head.weight"}  # tied stays tied
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.float(), expected[name]), name
    loaded = load(ready, "float32", "cpu").model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_untied_head_and_biases_survive(tmp_path: Path) -> None:
    source = model("qwen2", rows=304, tied=False)
    convert_gguf(write_gguf(tmp_path / "q.gguf", source, tokenizer()), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == source.state_dict().keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.float(), source.state_dict()[name]), name
    assert load(tmp_path / "out", "float32", "cpu").architecture == "Qwen2ForCausalLM"


def test_tokenizer_is_the_publishers(ready: Path) -> None:
    """Digits are split off although GGUF only names that rule; padding tokens are no tokens."""
    original, loaded = tokenizer(), load(ready, "auto", "cpu")
    text = f"{TEXT}<|im_start|>x =   12345\n\t42 é e\u0301 日本 [PAD310]<|im_end|>"
    ids = original.encode(text).ids
    assert loaded.tokenizer.encode(text).ids == ids
    assert AutoTokenizer.from_pretrained(ready)(text).input_ids == ids
    assert loaded.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert loaded.tokenizer.get_vocab() == original.get_vocab()
    assert loaded.vocab_size == original.get_vocab_size()
    assert loaded.model.get_input_embeddings().num_embeddings == 320


def test_what_lies_beside_the_weights(llama_file: Path, ready: Path) -> None:
    assert load(ready, "auto", "cpu").eos_ids == (2, 0)  # the file names only the first
    assert (ready / "chat_template.jinja").read_text() == model_files.TEMPLATE
    assert json.loads((ready / "tokenizer_config.json").read_text())["model_max_length"] == 128
    origin = json.loads((ready / "draftwire.json").read_text())
    done = subprocess.run(["sha256sum", llama_file], capture_output=True, text=True, check=True)
    assert origin["source"]["sha256"] == done.stdout.split()[0]
    assert origin["format"] == 2
    assert origin["not_native"] == "token_embd.weight is F32"
    everything = "".join(p.read_text() for p in ready.glob("*.json"))
    assert str(llama_file.parent) not in everything
    assert all(p.stat().st_mode & 0o044 for p in ready.iterdir())  # others may read it


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling yarn"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
    ],
)
def test_what_would_be_lost_is_refused(
    tmp_path: Path, extra: dict[str, object], named: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", model("llama", rows=320, tied=True), tokenizer(), extra)
    with pytest.raises(ModelError, match=named):
        convert_gguf(path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


@pytest.mark.parametrize("size", [0, 3, 100, 20_000, -200])
def test_a_file_cut_short_is_refused(tmp_path: Path, llama_file: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama_file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        convert_gguf(path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["cut.gguf"]


def test_missing_tensor_is_refused(tmp_path: Path) -> None:
    """transformers would make one up."""
    source = model("llama", rows=320, tied=True)
    del source.model.layers[1].mlp.up_proj
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", source, tokenizer()), tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_left_overs_of_a_killed_conversion_do_not_matter(tmp_path: Path, llama_file: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "rubbish").write_text("half")
    convert_gguf(llama_file, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert not (tmp_path / "out" / "rubbish").exists()


def test_an_existing_result_is_not_touched(tmp_path: Path, llama_file: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        convert_gguf(llama_file, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_tokenizer_json_is_made_of_older_files(tmp_path: Path) -> None:
    """vocab.json and merges.txt are enough; the weights are linked, not copied."""
    source = write_directory(tmp_path / "old", family="qwen2")
    bpe = json.loads((source / "tokenizer.json").read_text())["model"]
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(bpe["vocab"]))
    (source / "merges.txt").write_text("\n".join(" ".join(pair) for pair in bpe["merges"]))
    complete_directory(source, tmp_path / "out")
    loaded = load(tmp_path / "out", "auto", "cpu")
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(TEXT).ids) == TEXT
    assert loaded.vocab_size >= tokenizer().get_vocab_size()
    assert (tmp_path / "out" / "model.safetensors").samefile(source / "model.safetensors")
    assert (source / "model.safetensors").stat().st_mode == (
        (tmp_path / "out" / "model.safetensors").stat().st_mode
    )


def test_a_directory_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "bare")
    for path in source.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        complete_directory(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["bare"]


def test_truncated_model_is_the_first_layers(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "whole", family="qwen2", tied=False)
    truncate_layers(source, tmp_path / "cut", 1)
    whole, cut = (load(tmp_path / name, "float32", "cpu") for name in ("whole", "cut"))
    whole.model.model.layers = whole.model.model.layers[:1]
    ids = torch.tensor([cut.tokenizer.encode(TEXT).ids])
    assert torch.equal(whole.model(ids).logits, cut.model(ids).logits)
    assert cut.config.num_hidden_layers == 1
    assert not [n for n in load_file(tmp_path / "cut" / "model.safetensors") if "layers.1" in n]
    assert cut.eos_ids == whole.eos_ids
    assert cut.weights_hash != whole.weights_hash
    for layers in (0, 3):
        with pytest.raises(ModelError, match="2 layers"):
            truncate_layers(source, tmp_path / "no", layers)
    assert sorted(os.listdir(tmp_path)) == ["cut", "whole"]


def test_command_says_one_line_and_exits_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.gguf").write_text("nonsense\n" * 100)
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 2
    assert main([str(tmp_path / "absent.gguf"), str(tmp_path / "out")]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "not a GGUF file" in lines[0]
    assert "No such file" in lines[1]


def test_command_converts(tmp_path: Path, llama_file: Path) -> None:
    assert main([str(llama_file), str(tmp_path / "out")]) == 0
    assert main(["--truncate", "1", str(tmp_path / "out"), str(tmp_path / "cut")]) == 0
    shutil.rmtree(tmp_path / "out")
    assert load(tmp_path / "cut", "auto", "cpu").config.num_hidden_layers == 1


def test_tied_converter_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Its source is a pipe that nobody writes to: only the closing of its input can end it."""
    os.mkfifo(tmp_path / "stuck.gguf")
    command = [sys.executable, "-m", "engine.convert", "--tied", "stuck.gguf", "out"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 3
