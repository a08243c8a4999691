from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.__main__ import request
from loadtest.workload import RandomTokens, Texts, humaneval, spec_bench
from service.pb import draftwire_pb2 as pb


def test_humaneval_is_all_164_prompts_and_then_starts_again() -> None:
    workload = humaneval()
    prompts = [workload.prompt(i).text for i in range(165)]
    assert len(set(prompts)) == 164
    assert prompts[164] == prompts[0]
    assert "has_close_elements" in prompts[0]


def test_random_prompts_depend_on_seed_and_index_alone() -> None:
    def ids(seed: int, index: int) -> list[int]:
        return list(RandomTokens(1000, 20, seed).prompt(index).token_ids.ids)

    assert ids(1, 5) == ids(1, 5)
    assert ids(1, 5) != ids(1, 6) != ids(2, 6)


def test_spec_bench_takes_first_turns(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    questions = [{"question_id": i, "turns": [f"first {i}", "second"]} for i in range(2)]
    file.write_text("\n".join(map(json.dumps, questions)) + "\n")
    workload = spec_bench(file)
    contents = [workload.prompt(i).messages.messages[0].content for i in range(3)]
    assert contents == ["first 0", "first 1", "first 0"]


@pytest.mark.parametrize("line", ["not json", "{}", '{"turns": []}', "[1]"])
def test_spec_bench_names_the_line_that_is_wrong(tmp_path: Path, line: str) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text('{"turns": ["fine"]}\n' + line)
    with pytest.raises(ValueError, match=r"question\.jsonl:2"):
        spec_bench(file)


def test_spec_bench_of_nothing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text("\n")
    with pytest.raises(ValueError, match="no questions"):
        spec_bench(file)


def test_each_request_samples_with_its_own_seed() -> None:
    base = pb.GenerationParams(sampling=pb.Sampling(temperature=0.5))
    source = Texts(["a", "b"])
    seeds = [request(source, base, 2**64 - 1, i).sampling.seed for i in range(2)]
    assert seeds == [2**64 - 1, 0]
    assert not request(source, base, None, 0).sampling.HasField("seed")
    assert not base.sampling.HasField("seed")
