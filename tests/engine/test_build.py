"""An engine put together from settings; or one line that says why not."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from engine import pooled as building
from engine.build import Built, assemble, build
from engine.config import EngineConfig
from engine.drafting import draft_choice
from engine.errors import ConfigError, ModelError
from engine.network import make_network
from engine.ngram_count import count
from engine.ngram_table import write_table
from engine.observer import EngineObserver
from engine.pooled import load_models
from engine.runner import Network
from engine.training.evaluate import costless
from kernels.ops import Ops
from tests.engine import children
from tests.engine.children import PROMPTS, config_of, write_model
from tests.engine.fakes import RecordingObserver
from tests.engine.vocabularies import byte_level

TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    return children.reference(model, TOKENS)


def outputs(built: Built) -> list[list[int]]:
    for i, prompt in enumerate(PROMPTS):
        built.engine.submit(children.request(str(i), prompt, TOKENS, i or None))
    out: list[list[int]] = [[] for _ in PROMPTS]
    while built.engine.busy:
        for chunk in built.engine.step():
            out[int(chunk.request_id)].extend(chunk.tokens)
    return out


def drafting(config: EngineConfig, observer: EngineObserver) -> Built:
    """As `build` does it, but that drafts are taken to cost nothing."""
    models = costless(load_models(config, time.monotonic))
    draft = draft_choice(config, models, time.monotonic)
    return assemble(config, models, draft, time.monotonic, observer)


def test_with_a_draft_model(model: Path, reference: list[list[int]]) -> None:
    observer = RecordingObserver()
    built = drafting(config_of(model, draft=f"model:{model}"), observer)
    assert built.info.draft_sources == ("grammar", "model")
    assert outputs(built) == reference
    drafted = sum(r.drafted for r in observer.reports)
    assert drafted == sum(r.accepted for r in observer.reports) > 20


def test_a_draft_that_costs_as_much_as_the_target_is_hardly_used(
    model: Path, reference: list[list[int]]
) -> None:
    """By default; however good it is."""
    observer = RecordingObserver()
    built = build(config_of(model, draft=f"model:{model}"), time.monotonic, observer)
    assert outputs(built) == reference
    steps = len(observer.reports)
    assert sum(r.drafted for r in observer.reports) < steps / 4


def test_with_a_draft_of_other_padding(
    model: Path, reference: list[list[int]], tmp_path: Path
) -> None:
    """Same tokenizer, other number of embedding rows: fine. What it drafts is in both."""
    write_model(tmp_path, seed=1, rows=421)
    observer = RecordingObserver()
    built = drafting(config_of(model, draft=f"ngram,model:{tmp_path}"), observer)
    assert outputs(built) == reference
    assert sum(r.drafted for r in observer.reports) > 20
    assert max(r.draft_errors for r in observer.reports) == 0


def test_a_draft_of_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=400)
    with pytest.raises(ModelError, match=r"420.*400|400.*420"):
        build(config_of(model, draft=f"model:{tmp_path}"), time.monotonic)
    byte_level(420, ("other text " * 50,)).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError):
        build(config_of(model, draft=f"model:{tmp_path}"), time.monotonic)


def test_a_missing_draft_is_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="/nowhere"):
        build(config_of(model, draft="model:/nowhere"), time.monotonic)


def test_with_what_was_counted_and_what_was_said(
    model: Path, reference: list[list[int]], tmp_path: Path
) -> None:
    table = tmp_path / "table"
    said = [[*prompt, *out] for prompt, out in zip(PROMPTS, reference, strict=True)]
    write_table(table, children.IDS, count(said * 2, children.IDS, 1 << 20))
    observer = RecordingObserver()
    built = drafting(config_of(model, draft=f"suffix,table:{table}"), observer)
    assert built.info.draft_sources == ("grammar", "suffix", "table")
    for _ in range(2):
        assert outputs(built) == reference
    accepted = {name for r in observer.reports for name, stats in r.by_source if stats.accepted}
    assert accepted == {"suffix", "table"}
    assert max(r.draft_errors for r in observer.reports) == 0


def test_a_table_that_is_no_use_is_refused(model: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    write_table(large, 10_000, count([[1, 2, 3]] * 2, 10_000, 1 << 20))
    with pytest.raises(ConfigError, match=r"table:.*large: .* 10000 .* has 420"):
        build(config_of(model, draft=f"table:{large}"), time.monotonic)
    with pytest.raises(ConfigError, match=r"draft source table:/nowhere: .*header\.json"):
        build(config_of(model, draft="table:/nowhere"), time.monotonic)


def test_memory_for_the_target_alone_is_not_enough(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says how much both need, and how much there may be."""
    per_token = building.KVShape(300, 8, 128, torch.float32)
    monkeypatch.setattr(building, "kv_shape", lambda loaded, kv_dtype: per_token)
    need = 2 * 16 * per_token.bytes_per_token
    with pytest.raises(ConfigError, match=f"need {need} bytes.* {50 << 20} are allowed"):
        build(config_of(model, draft=f"model:{model}", kv_cache_mib=50), time.monotonic)


def test_both_pools_together_stay_within_the_budget(model: Path) -> None:
    alone = build(config_of(model, draft="none"), time.monotonic).info
    both = build(config_of(model, draft=f"model:{model}"), time.monotonic).info
    assert both.num_blocks == alone.num_blocks // 2


def test_the_context_may_be_shortened_and_not_lengthened(model: Path) -> None:
    short = build(config_of(model, max_context=100), time.monotonic).info
    long = build(config_of(model, max_context=10**6), time.monotonic).info
    assert (short.context_limit, long.context_limit) == (100, children.CONTEXT)


def test_the_fingerprint_names_what_decides_the_bits(model: Path, tmp_path: Path) -> None:
    def fingerprint(**changes: object) -> str:
        config = replace(config_of(model), **changes)  # type: ignore[arg-type]
        return build(config, time.monotonic).info.fingerprint

    plain = fingerprint()
    assert fingerprint(draft="none", kv_cache_mib=8, max_draft_tokens=2) == plain
    assert fingerprint(dtype="bfloat16") != plain
    assert fingerprint(model=str(write_model(tmp_path, seed=1))) != plain


def test_attention_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Gemma 2 caps its attention scores, which the paged kernels do not: never served wrong."""
    config = Gemma2Config(
        vocab_size=children.ROWS,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="softcap"):
        build(config_of(tmp_path), time.monotonic)


def test_kernels_that_are_wrong_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(ops: Ops) -> Ops:
        def write_kv(k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> None:
            ops.write_kv(k, torch.zeros_like(v), *rest)  # type: ignore[arg-type]

        return replace(ops, write_kv=write_kv)  # type: ignore[arg-type]

    ops_of = building._load_ops
    monkeypatch.setattr(building, "_load_ops", lambda *which: blind(ops_of(*which)))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: logits .* differ .* not serving it"):
        build(config_of(model, numerics="fast"), time.monotonic)


def test_a_pass_that_is_wrong_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def skewed(loaded: Any, *rest: Any) -> Network:
        loaded.model.layers[1].input_layernorm.weight.mul_(1.3)
        return make_network(loaded, *rest)

    monkeypatch.setattr(building, "make_network", skewed)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: logits .* differ .* not serving it"):
        build(config_of(model), time.monotonic)


def test_an_unknown_instruction_set_is_a_setting_that_cannot_work(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWIRE_ISA", "mmx")
    with pytest.raises(ConfigError, match="mmx"):
        build(config_of(model), time.monotonic)
