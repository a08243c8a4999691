"""A directory is loaded as it is meant, or refused with one line that names the cause."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from engine.errors import ConfigError, ModelError
from engine.loader import check_same_vocabulary, load, resolve_device, resolve_dtype
from tests.engine.model_files import TEXT, tokenizer, write_directory

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("models") / "good")


@pytest.fixture
def broken(good: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(good, tmp_path / "broken")


def edit(path: Path, **changes: object) -> None:
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def test_model_is_ready_to_compute(good: Path) -> None:
    loaded = load(good, "bfloat16", "cpu")
    assert loaded.architecture == "LlamaForCausalLM"
    assert loaded.context_limit == 128
    assert loaded.vocab_size == tokenizer().get_vocab_size() < 320
    assert loaded.eos_ids == (2,)
    assert loaded.sliding_window is None
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    expected = load_file(good / "model.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    ids = torch.tensor([loaded.tokenizer.encode(TEXT).ids])
    assert loaded.model(ids).logits.isfinite().all()


def test_float32_has_the_same_values(good: Path) -> None:
    wide = load(good, "float32", "cpu").model.state_dict()
    narrow = load(good, "bfloat16", "cpu").model.state_dict()
    assert all(t.dtype == torch.float32 for t in wide.values())
    assert all(torch.equal(wide[name], narrow[name].float()) for name in narrow)


def test_sliding_window_is_told(broken: Path) -> None:
    edit(broken / "config.json", model_type="mistral", architectures=["MistralForCausalLM"])
    edit(broken / "config.json", sliding_window=24)
    assert load(broken, "auto", "cpu").sliding_window == 24


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([2, 0], 1, (2, 0)),
        (0, 1, (0,)),
        (None, 1, (1,)),
        (None, [1, 2], (1, 2)),
        (None, None, (2,)),
    ],
)
def test_eos_ids_come_from_the_most_telling_file(
    broken: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    edit(broken / "generation_config.json", eos_token_id=generation)
    edit(broken / "config.json", eos_token_id=config)
    if generation is None:
        (broken / "generation_config.json").unlink()
    assert load(broken, "auto", "cpu").eos_ids == expected


def test_hash_follows_weights_and_origin(good: Path, broken: Path) -> None:
    """Another training of the same architecture has the same header, but other bytes."""
    before = load(good, "float32", "cpu").weights_hash
    assert load(broken, "bfloat16", "cpu").weights_hash == before
    tensors = load_file(good / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    changed = load(broken, "auto", "cpu").weights_hash
    assert changed != before
    (broken / "draftwire.json").write_text("{}")
    assert load(broken, "auto", "cpu").weights_hash not in (before, changed)


def cut_weights(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def garble_weights(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\xff" * 5000)


def drop_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def misfit_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3, 3, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def lose_shard(path: Path) -> None:
    (path / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def foreign_tokenizer(path: Path) -> None:
    vocabulary = {f"t{i}": i for i in range(400)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (shutil.rmtree, "is not a directory"),
        (lambda p: (p / "config.json").unlink(), "has no config.json"),
        (lambda p: (p / "config.json").write_text("{oops"), "config.json is not JSON"),
        (lambda p: (p / "config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda p: edit(p / "config.json", model_type="martian"), "martian"),
        (lambda p: edit(p / "config.json", model_type=None), "cannot be loaded"),
        (lambda p: edit(p / "config.json", hidden_size=48), "wrong shape"),
        (lambda p: edit(p / "config.json", num_hidden_layers=3), r"missing.*layers\.2"),
        (lambda p: (p / "model.safetensors").unlink(), "has no model.safetensors"),
        (lose_shard, "has no model-00001-of-00002.safetensors"),
        (cut_weights, "model.safetensors is corrupt or cut short"),
        (garble_weights, "model.safetensors is corrupt or cut short"),
        (drop_tensor, r"missing.*layers\.0\.self_attn\.k_proj"),
        (misfit_tensor, r"wrong shape.*k_proj"),
        (lambda p: (p / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda p: (p / "tokenizer.json").write_text("{}"), "tokenizer.json is not a tokenizer"),
        (foreign_tokenizer, "400 ids and the model 320"),
    ],
)
def test_bad_directory_is_named(broken: Path, harm: Callable[[Path], object], named: str) -> None:
    harm(broken)
    with pytest.raises(ModelError, match=named) as caught:
        load(broken, "auto", "cpu")
    assert "\n" not in str(caught.value)
    assert str(broken) in str(caught.value)


def test_good_directory_loads_after_a_bad_one(good: Path, broken: Path) -> None:
    cut_weights(broken)
    with pytest.raises(ModelError):
        load(broken, "auto", "cpu")
    assert load(good, "auto", "cpu").vocab_size == 300


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_gpu_is_refused_when_asked_for(good: Path) -> None:
    with pytest.raises(ConfigError, match="device cuda: this machine has"):
        load(good, "auto", "cuda")
    assert resolve_device("auto") == CPU


@pytest.mark.parametrize("name", ["", "gpu", "meta", "cuda:x"])
def test_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown device"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512_bf16", torch.bfloat16),
        ("fpu avx2 amx_tile amx_bf16", torch.bfloat16),
        ("fpu avx2 avx512f avx512_vnni amx_int8", torch.float32),
        ("fpu sse2", torch.float32),
    ],
)
def test_auto_dtype_is_bf16_only_where_it_is_native(
    tmp_path: Path, flags: str, expected: torch.dtype
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: avx512_bf16\nflags\t\t: {flags}\nbugs\t\t:\n")
    assert resolve_dtype("auto", CPU, info) == expected
    assert resolve_dtype("auto", torch.device("cuda"), info) == torch.bfloat16
    assert resolve_dtype("bfloat16", CPU, info) == torch.bfloat16
    assert resolve_dtype("auto", CPU, tmp_path / "absent") == torch.float32
    with pytest.raises(ConfigError, match="unknown dtype 'half'"):
        resolve_dtype("half", CPU, info)


def test_padding_is_no_difference_of_vocabulary(tmp_path: Path, good: Path) -> None:
    draft = write_directory(tmp_path / "draft", family="qwen2", rows=448)
    assert check_same_vocabulary(good, draft) == 300
    assert check_same_vocabulary(draft, good) == 300


def test_permuted_vocabulary_is_refused(good: Path, broken: Path) -> None:
    path = broken / "tokenizer.json"
    value = json.loads(path.read_text())
    vocabulary = value["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(value))
    first = tokenizer().token_to_id("a")
    with pytest.raises(ModelError, match=rf"300 tokens.*300 tokens.*id {first} is 'b'.*and 'a'"):
        check_same_vocabulary(good, broken)


def test_larger_vocabulary_is_refused(good: Path, tmp_path: Path) -> None:
    draft = write_directory(tmp_path / "draft", vocab_size=310)
    with pytest.raises(ModelError, match=r"310 tokens.*300 tokens.*id 300 is '.*nothing"):
        check_same_vocabulary(good, draft)


def test_no_network_and_no_noise(good: Path, broken: Path) -> None:
    """Neither a connection attempt nor a line on stderr, for a good directory and for a bad one."""
    misfit_tensor(broken)
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from engine.errors import ModelError\n"
        "from engine.loader import load\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(load(path, 'bfloat16', 'cpu').vocab_size)\n"
        "    except ModelError as error: print(error)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, good, broken],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == "300"
    assert second.startswith(f"{broken}: 1 weights are missing or of the wrong shape")
