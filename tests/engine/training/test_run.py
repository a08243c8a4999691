"""From files to drafts that are served, in one go and in pieces; or one line that says why not."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path

import pytest
from transformers import Gemma2Config, Gemma2ForCausalLM

from engine.build import build
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.head_file import About, read_about, save_head
from engine.loader import load
from engine.request import Request, SamplingParams, StopParams
from engine.training import scoring, writing
from engine.training.corpus import Corpus
from engine.training.evaluate import rates
from engine.training.order import Interrupted, Order
from engine.training.progress import Progress
from engine.training.run import train_draft
from engine.training.start import common_ids, new_head
from tests.engine.training.models import IDS, write_target
from tests.engine.vocabularies import byte_level

TOKENS = 48


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """Of which nothing must be made ready."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing, "KV_MIB", 16)
        patched.setattr(scoring, "KV_MIB", 16)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    lines = ([rng.randrange(3, IDS) for _ in range(rng.randint(3, 12))] for _ in range(200))
    text = "".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in lines)
    (directory / "records.jsonl").write_text(text)
    return directory


def order_of(target: Path, data: Path, out: Path, **changes: object) -> Order:
    order = Order(str(target), (str(data),), str(out), threads=1, tokens=2500, steps=6)
    return replace(order, **changes)  # type: ignore[arg-type]


def make(order: Order, stopped: Callable[[], bool] = lambda: False) -> str:
    said = StringIO()
    train_draft(order, time.monotonic, Progress(said), stopped)
    return said.getvalue()


def after(times: int) -> Callable[[], bool]:
    """Whether it was asked more often than that."""
    asked = count()
    return lambda: next(asked) >= times


@pytest.fixture(scope="module")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sets") / "set"
    said = make(order_of(target, data, out, tokens=9000, steps=60))
    assert f"{out} is finished: serve it with --draft ngram,table:{out},head:{out}" in said
    return out


@pytest.fixture(scope="module")
def short(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in one go, of little."""
    out = tmp_path_factory.mktemp("sets") / "set"
    make(order_of(target, data, out))
    return out


def config_of(target: Path, draft: str) -> EngineConfig:
    return EngineConfig(str(target), draft=draft, threads=1, kv_cache_mib=16)


def requests(temperature: float) -> list[Request]:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(3, IDS) for _ in range(8)) for _ in range(8)]
    return [
        Request(str(i), prompt, StopParams(TOKENS), SamplingParams(temperature, seed=i))
        for i, prompt in enumerate(prompts)
    ]


def outputs(config: EngineConfig, temperature: float) -> list[list[int]]:
    engine = build(config, time.monotonic).engine
    out: list[list[int]] = [[] for _ in requests(0.0)]
    for request in requests(temperature):
        engine.submit(request)
    while engine.busy:
        for chunk in engine.step():
            out[int(chunk.request_id)].extend(chunk.tokens)
    return out


def test_what_is_served_is_the_same(target: Path, trained: Path) -> None:
    for temperature in (0.0, 1.0):
        expected = outputs(config_of(target, "none"), temperature)
        for draft in (f"head:{trained}", f"table:{trained},head:{trained}"):
            assert outputs(config_of(target, draft), temperature) == expected


def test_training_is_what_makes_it_good(target: Path, trained: Path, tmp_path: Path) -> None:
    loaded = load(target, "auto", "cpu")
    corpus = Corpus(trained / "work" / "corpus", loaded.config.hidden_size)
    vocabulary = common_ids(corpus, 4096)
    save_head(new_head(loaded, corpus, vocabulary, 0), tmp_path)
    About.of(loaded, len(vocabulary), {}).write(tmp_path)
    before, after = (
        rates(config_of(target, f"head:{directory}"), requests(0.0))
        for directory in (tmp_path, trained)
    )
    assert before.tokens == after.tokens == 8 * (TOKENS - 1)
    assert after.tokens / after.steps > 1.3 * before.tokens / before.steps
    table = rates(config_of(target, f"table:{trained}"), requests(0.0))
    assert table.tokens / table.steps > 1.5


def test_a_set_says_what_it_is(target: Path, trained: Path) -> None:
    about = read_about(trained, load(target, "auto", "cpu"))
    assert about.recipe["steps"] == 60
    assert about.recipe["rows"] >= 9000
    scores = about.scores
    assert scores["held_out"] >= 2
    assert len(scores["accuracy_by_depth"]) == 3
    together = scores["greedy"]["ngram,table:SET,head:SET"]
    assert together["tokens_per_step"] > 1.0
    assert sorted(p.name for p in trained.iterdir()) == [
        "draft.json", "head.safetensors", "table", "work",
    ]  # fmt: skip


def test_what_is_finished_is_left_alone(target: Path, data: Path, short: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in short.rglob("*")}
    said = make(order_of(target, data, short))
    assert said == f"{short} is finished; nothing was done\n"
    assert {p: p.stat().st_mtime_ns for p in short.rglob("*")} == before


def test_for_another_target_it_is_not_taken(data: Path, short: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="their weights_hash is"):
        make(order_of(other, data, short))


class Killed(Exception):
    """Nothing gets to run after it."""


def test_stopped_again_and_again_it_ends_with_the_same_head(
    target: Path, data: Path, short: Path, tmp_path: Path
) -> None:
    """In training, where the number of steps and the corpus are settled."""
    out = tmp_path / "set"
    (out / "work").mkdir(parents=True)
    shutil.copytree(short / "work" / "corpus", out / "work" / "corpus")
    shutil.copy(short / "work" / "account.json", out / "work")
    for patience in (1, 2, 1):
        with pytest.raises(Interrupted):
            make(order_of(target, data, out), after(patience))
        assert not (out / "draft.json").exists()
    make(order_of(target, data, out))
    assert (out / "head.safetensors").read_bytes() == (short / "head.safetensors").read_bytes()
    for name in ("header.json", "table.bin"):
        assert (out / "table" / name).read_bytes() == (short / "table" / name).read_bytes()


def test_stopped_while_it_writes_it_goes_on_with_other_prompts(
    target: Path, data: Path, tmp_path: Path
) -> None:
    out, corpus, numbers = tmp_path / "set", tmp_path / "set" / "work" / "corpus", []
    for _ in range(3):
        with pytest.raises(Interrupted):
            make(order_of(target, data, out, tokens=10**6), after(60))
        numbers.append([d.number for d in Corpus(corpus, 64).documents])
        assert not (out / "draft.json").exists()
    assert 0 < len(numbers[0]) < len(numbers[1]) < len(numbers[2])
    assert len(set(numbers[2])) == len(numbers[2])
    rows = Corpus(corpus, 64).rows
    make(order_of(target, data, out, tokens=rows + 100))
    assert (out / "draft.json").exists()


@pytest.mark.parametrize("name", ["head.safetensors", "draft.json"])
def test_killed_while_the_set_is_put_in_its_place(
    target: Path,
    data: Path,
    short: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """It is no set before it is complete."""
    out = tmp_path / "set"
    shutil.copytree(short / "work", out / "work")
    inner = Path.replace

    def killed(self: Path, to: Path) -> Path:
        if Path(to) == out / name:
            raise Killed
        return inner(self, to)

    loaded = load(target, "auto", "cpu")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            make(order_of(target, data, out))
    with pytest.raises(ConfigError, match="holds no set of drafts"):
        read_about(out, loaded)
    make(order_of(target, data, out))
    assert read_about(out, loaded).scores
    assert (out / "head.safetensors").read_bytes() == (short / "head.safetensors").read_bytes()


def test_no_longer_than_it_may_take(target: Path, data: Path, tmp_path: Path) -> None:
    """Scoring included. With room for a machine that is busy for a moment."""
    begun = time.monotonic()
    make(order_of(target, data, tmp_path / "set", tokens=0, steps=0, minutes=0.2))
    account = json.loads((tmp_path / "set" / "work" / "account.json").read_text())
    taken = time.monotonic() - begun
    assert account["spent"] == pytest.approx(taken, abs=3.0)
    assert 7.0 < taken < 40.0


def test_two_at_once(target: Path, data: Path, short: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    shutil.copytree(short / "work", out / "work")
    with (out / "work" / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="work is in use"):
            make(order_of(target, data, out))


def test_too_little_time(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^0\.001 minutes are too few"):
        make(order_of(target, data, tmp_path / "set", tokens=0, minutes=0.001))


def test_begun_as_another_order(target: Path, data: Path, short: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    shutil.copytree(short / "work", out / "work")
    with pytest.raises(ValueError, match="work was begun with seed 0, not 1; remove it"):
        make(order_of(target, data, out, seed=1))
    with pytest.raises(ValueError, match="begun with vocabulary 4096, not 7"):
        make(order_of(target, data, out, vocabulary=7))


def test_data_that_is_of_no_use(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    with pytest.raises(ValueError, match="absent is neither a folder nor"):
        make(order_of(target, tmp_path / "absent", out))
    assert not out.exists()  # found out before anything was begun
    foreign = tmp_path / "a.jsonl"
    foreign.write_text(json.dumps({"prompt_token_ids": [5, IDS]}) + "\n")
    with pytest.raises(ValueError, match="no prompt that the model wrote anything after"):
        make(order_of(target, foreign, out))
    foreign.write_text('{"prompt_token_ids": 7}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: no prompt"):
        make(order_of(target, foreign, tmp_path / "set2"))


def test_a_model_that_there_is_no_head_for(data: Path, tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=IDS, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    byte_level(IDS).save(str(tmp_path / "gemma" / "tokenizer.json"))
    with pytest.raises(ConfigError, match="not for Gemma2ForCausalLM"):
        make(order_of(tmp_path / "gemma", data, tmp_path / "set"))
    with pytest.raises(ConfigError, match="absent is not a directory"):
        make(order_of(tmp_path / "absent", data, tmp_path / "set"))


@pytest.mark.parametrize(
    "changes",
    [{"minutes": 0.0}, {"tokens": -1}, {"vocabulary": 0}, {"out": "a,b"}, {"threads": -1}],
)
def test_orders_that_make_no_sense(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes)).replace("out", "comma")[:5] + "|numb"):
        replace(Order("m", ("d",), "o"), **changes)  # type: ignore[arg-type]
