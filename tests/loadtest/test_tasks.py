from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.peers.contender import Job
from loadtest.tasks import Plan, read_texts, tasks, warm_up


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_no_prompt_comes_twice_even_when_there_are_few() -> None:
    plan = Plan((1, 4), max_tokens=8, rounds=3, repeats=2, prefill_tokens=50)
    made = tasks([f"text number {i}" for i in range(5)], encode, plan)
    assert [(task.name, task.unit) for task in made] == [
        ("1 at once", "tok/s"),
        ("4 at once", "tok/s"),
        ("prefill 50", "prompt tok/s"),
    ]
    prompts = [p for task in made for job in task.jobs for p in job.prompts]
    assert len(prompts) == 3 * (2 + 4 + 2) == len(set(prompts))
    assert tuple(encode("Once upon a time")) == warm_up(encode).prompts[0]


def test_jobs_have_the_asked_shape() -> None:
    plan = Plan((1, 4), max_tokens=8, rounds=2, repeats=3, prefill_tokens=50)
    one, four, prefill = tasks(["abc", "de"], encode, plan)
    assert [(len(j.prompts), j.at_once, j.max_tokens) for j in one.jobs] == [(3, 1, 8)] * 2
    assert [(len(j.prompts), j.at_once) for j in four.jobs] == [(4, 4)] * 2
    assert {len(p) for j in prefill.jobs for p in j.prompts} == {50}
    assert (one.amount(one.jobs[0]), prefill.amount(prefill.jobs[0])) == (24, 150)
    assert len(tasks(["abc"], encode, Plan(prefill_tokens=0))) == 3


def test_the_order_is_the_same_every_time() -> None:
    texts = [f"text {i}" for i in range(20)]
    assert tasks(texts, encode, Plan()) == tasks(texts, encode, Plan())


def test_waves() -> None:
    job = Job(((1,), (2,), (3,)), 2, 8)
    assert job.waves == (((1,), (2,)), ((3,),))


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n')
    assert read_texts(file) == ["a", "b"]
    file.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:2: no prompt"):
        read_texts(file)
    file.write_text("")
    with pytest.raises(ValueError, match="no prompts"):
        read_texts(file)
