"""The load test against a scripted server, over real connections."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from typing import Any

import pytest

from loadtest.client import Record
from loadtest.report import summarise
from loadtest.runner import Load, measure
from service.pb import draftwire_pb2 as pb
from tests.loadtest.fakes import FakeServer, Script, serve, status


def prompts(index: int) -> pb.GenerationParams:
    return pb.GenerationParams(text=f"prompt {index}")


def load(target: str, **changes: Any) -> Load:
    usual = {"concurrency": 4, "requests": 10, "warmup": 0, "streams": 2, "timeout": 20.0}
    return Load(target=target, **(usual | changes))


async def test_every_request_is_sent_once_over_few_streams() -> None:
    async with serve(FakeServer()) as fake:
        records = await measure(load(fake.target, warmup=3), prompts, lambda _: None)
    assert len(records) == 10
    assert all(record.error == "" for record in records)
    warmup, measured = fake.requests[:3], fake.requests[3:]
    assert {params.text for params in warmup} == {"prompt 10", "prompt 11", "prompt 12"}
    assert {params.text for params in measured} == {f"prompt {i}" for i in range(10)}
    assert fake.sessions == 2
    assert not fake.dropped.is_set()


async def test_the_loop_is_closed() -> None:
    """Exactly `concurrency` generations are in flight, however many requests wait."""
    fake = FakeServer(lambda _: Script(hold=True))
    async with serve(fake), asyncio.timeout(20):
        running = asyncio.create_task(
            measure(load(fake.target, concurrency=3), prompts, lambda _: None)
        )
        for _ in range(3):
            await fake.holding.acquire()
        running.cancel()
        await asyncio.wait([running])
    assert running.cancelled()
    assert fake.most_live == len(fake.requests) == 3


async def test_out_of_time_is_counted_and_cancels_on_the_server() -> None:
    fake = FakeServer(lambda params: Script(hold=params.text == "prompt 1"))
    async with serve(fake):
        records = await measure(
            load(fake.target, requests=3, concurrency=2, timeout=2.0), prompts, lambda _: None
        )
        async with asyncio.timeout(10):
            await fake.dropped.wait()
    report = summarise(records, workload="w", concurrency=2, requests=3)
    assert report.errors_by_kind == {"TIMEOUT": 1}
    assert report.output_tokens == 10


async def test_errors_are_counted_by_kind_and_the_rest_goes_on() -> None:
    scripts = {
        "prompt 1": Script(reject=status("RESOURCE_EXHAUSTED", "full")),
        "prompt 2": Script(reason=pb.FINISH_REASON_ERROR, error=status("INTERNAL", "step failed")),
        "prompt 3": Script(reason=pb.FINISH_REASON_DEADLINE),
    }
    fake = FakeServer(lambda params: scripts.get(params.text, Script()))
    async with serve(fake):
        records = await measure(load(fake.target), prompts, lambda _: None)
    report = summarise(records, workload="w", concurrency=4, requests=10)
    assert report.errors_by_kind == {"RESOURCE_EXHAUSTED": 1, "ERROR/INTERNAL": 1, "DEADLINE": 1}
    assert report.errors == 3
    assert report.output_tokens == 7 * 5


async def test_a_broken_stream_fails_what_was_on_it_and_is_opened_again() -> None:
    fake = FakeServer(lambda params: Script(breaks=params.text == "prompt 0"))
    async with serve(fake):
        records = await measure(
            load(fake.target, concurrency=1, streams=1, requests=3), prompts, lambda _: None
        )
    assert [record.error for record in records] == ["UNAVAILABLE", "", ""]
    assert fake.sessions == 2


async def test_no_server_is_an_error_of_every_request() -> None:
    async with serve(FakeServer()) as fake:
        pass
    records = await measure(load(fake.target), prompts, lambda _: None)
    assert [record.error for record in records] == ["UNAVAILABLE"] * 10


def record(started: float, deltas: list[tuple[float, int]], finished: pb.Finished) -> Record:
    return Record(started, deltas[-1][0], deltas, finished)


def test_latencies_are_amortised_over_the_tokens_of_a_delta() -> None:
    end = pb.Finished(
        usage=pb.Usage(prompt_tokens=3, completion_tokens=6),
        speculation=pb.SpeculationStats(
            drafted=8,
            accepted=3,
            target_steps=3,
            by_source={
                "ngram": pb.SourceStats(
                    drafted=6, accepted=3, drafted_at=[3, 2, 1], accepted_at=[2, 1]
                ),
                "model": pb.SourceStats(drafted=2),
            },
        ),
    )
    # 1 token at 2.0, 4 tokens at 4.0 (gaps of 0.5), 1 token at 5.0 (a gap of 1)
    one = record(1.0, [(2.0, 1), (4.0, 4), (5.0, 1)], end)
    report = summarise([one, one], workload="w", concurrency=2, requests=2)
    assert report.ttft_s == {"p50": 1.0, "p90": 1.0, "p95": 1.0, "p99": 1.0}
    assert report.e2e_s["p50"] == 4.0
    assert report.itl_s["p50"] == 0.5
    assert report.itl_s["p90"] == 1.0
    assert report.duration_s == 4.0
    assert report.output_tok_s == 12 / 4.0
    assert report.tokens_per_target_step == 2.0
    by_source = report.as_dict()["by_source"]
    assert by_source == {
        "ngram": {
            "drafted": 12,
            "accepted": 6,
            "drafted_at": [6, 4, 2],
            "accepted_at": [4, 2],
        },
        "model": {"drafted": 4, "accepted": 0, "drafted_at": [], "accepted_at": []},
    }


def test_nothing_to_sum_up_is_a_report_too() -> None:
    report = summarise([], workload="w", concurrency=1, requests=4)
    assert (report.errors, report.output_tok_s, report.ttft_s["p50"]) == (4, 0.0, None)
    json.dumps(report.as_dict())


async def _command(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "loadtest", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command_ends_with_one_json_object() -> None:
    async with serve(FakeServer()) as fake:
        code, out, _ = await _command(
            *("--target", fake.target, "--workload", "humaneval", "--requests", "170"),
            *("--concurrency", "8", "--max-tokens", "5", "--seed", "3", "--ignore-eos", "--json"),
        )
    assert code == 0, out
    *lines, last = out.splitlines()
    report = json.loads(last)
    assert any("tokens per target step" in line for line in lines)
    ranks = {"p50", "p90", "p95", "p99"}
    assert all(set(report[name]) == ranks for name in ("ttft_s", "itl_s", "e2e_s"))
    assert (report["requests"], report["errors"], report["output_tokens"]) == (170, 0, 850)
    assert report["tokens_per_target_step"] == 2.5
    assert report["output_tok_s"] > 0
    texts = [params.text for params in fake.requests]
    assert len(set(texts)) == 164
    assert sorted(texts)[0].strip().startswith(("def", "from", "import", '"""'))
    assert {params.sampling.seed for params in fake.requests} == set(range(3, 173))
    first = fake.requests[0]
    assert first.sampling.HasField("temperature")
    assert first.sampling.temperature == 0
    assert (first.stopping.max_tokens, first.stopping.ignore_eos) == (5, True)


async def test_the_command_fails_when_a_request_did() -> None:
    numbers = count()
    scripts = (Script(reject=status("UNAVAILABLE", "restarting")), Script())
    fake = FakeServer(lambda _: scripts[min(next(numbers), 1)])
    async with serve(fake):
        code, out, _ = await _command("--target", fake.target, "--requests", "3", "--json")
    assert code == 1
    assert json.loads(out.splitlines()[-1])["errors_by_kind"] == {"UNAVAILABLE": 1}


async def test_random_prompts_stay_inside_the_vocabulary() -> None:
    async with serve(FakeServer()) as fake:
        code, out, err = await _command(
            *("--target", fake.target, "--workload", "random", "--prompt-tokens", "50"),
            *("--requests", "4", "--json"),
        )
    assert code == 0, out + err
    ids = [tuple(params.token_ids.ids) for params in fake.requests]
    assert all(len(prompt) == 50 and 0 <= min(prompt) <= max(prompt) < 100 for prompt in ids)
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    "arguments", [("--workload", "spec-bench"), ("--frobnicate",), ("--requests", "0")]
)
async def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    code, out, err = await _command(*arguments)
    assert (code, out) == (2, "")
    assert "Error" in err
