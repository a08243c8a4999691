"""`draftwire generate` as a process, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from service.pb import draftwire_pb2 as pb
from tests.loadtest.fakes import FakeServer, Script, serve, status

PIPE = asyncio.subprocess.PIPE
DEFAULT_TEXT = "Hello, wörld"


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service", "generate", *arguments),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | {"http_proxy": "http://127.0.0.1:9", "COLUMNS": "200"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def generate(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    async with started(*arguments) as process, asyncio.timeout(30):
        out, err = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_stdout_is_the_text_and_nothing_else() -> None:
    async with serve(FakeServer()) as fake:
        code, out, err = await generate("def f():", "--target", fake.target)
    assert (code, out, err) == (0, DEFAULT_TEXT, "")


async def test_only_what_is_given_is_sent() -> None:
    async with serve(FakeServer()) as fake:
        await generate("a prompt", "--target", fake.target)
    assert fake.requests == [pb.GenerationParams(text="a prompt")]


async def test_every_option_reaches_the_server() -> None:
    async with serve(FakeServer()) as fake:
        code, _, err = await generate(
            *("-", "--target", fake.target, "--chat", "--max-tokens", "0", "--temperature", "0"),
            *("--top-k", "40", "--top-p", "0.5", "--min-p", "0", "--seed", str(2**64 - 1)),
            *("--stop", "\n\n", "--stop", "END", "--ignore-eos", "--priority", "interactive"),
            *("--timeout", "1.5", "--no-speculation", "--max-draft-tokens", "0"),
            *("--draft-source", "ngram", "--draft-source", "model"),
            stdin="naïve\n".encode(),
        )
    assert code == 0, err
    message = pb.ChatMessage(role="user", content="naïve\n")
    assert fake.requests == [
        pb.GenerationParams(
            messages=pb.ChatMessages(messages=[message]),
            sampling=pb.Sampling(temperature=0, top_k=40, top_p=0.5, min_p=0, seed=2**64 - 1),
            stopping=pb.Stopping(max_tokens=0, stop=["\n\n", "END"], ignore_eos=True),
            speculation=pb.Speculation(off=True, max_draft_tokens=0, sources=["ngram", "model"]),
            priority=pb.PRIORITY_INTERACTIVE,
            timeout=Duration(seconds=1, nanos=500_000_000),
        )
    ]


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        (["--json-schema", '{"type": "object"}'], pb.Grammar(json_schema='{"type": "object"}')),
        (["--json-schema", "FILE"], pb.Grammar(json_schema='{"enum": ["naïve"]}\n')),
        (["--json-schema", "x" * 5000], pb.Grammar(json_schema="x" * 5000)),
        (["--regex", "[a-z]+"], pb.Grammar(regex="[a-z]+")),
        (
            ["--choice", "yes", "--choice", "no"],
            pb.Grammar(choice=pb.Choice(options=["yes", "no"])),
        ),
        (["--grammar", 'start: "a"'], pb.Grammar(lark='start: "a"')),
        (["--grammar", "FILE"], pb.Grammar(lark='{"enum": ["naïve"]}\n')),
    ],
)
async def test_grammars(options: list[str], grammar: pb.Grammar, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"enum": ["naïve"]}\n', encoding="utf-8")
    options = [str(file) if option == "FILE" else option for option in options]
    async with serve(FakeServer()) as fake:
        code, _, err = await generate("x", "--target", fake.target, *options)
    assert code == 0, err
    assert fake.requests == [pb.GenerationParams(text="x", grammar=grammar)]


async def test_grammars_exclude_one_another() -> None:
    code, _, err = await generate("x", "--regex", "a", "--choice", "b")
    assert code == 2
    assert "exclude one another" in err


async def test_json_is_one_object_with_exactly_these_keys() -> None:
    async with serve(FakeServer()) as fake:
        code, out, err = await generate("x", "--target", fake.target, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "text": DEFAULT_TEXT,
        "token_ids": [1, 2, 3, 4, 5],
        "finish_reason": "LENGTH",
        "seed": 2**63 + 1,
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "cached_tokens": 0},
        "speculation": {
            "drafted": 6,
            "accepted": 3,
            "target_steps": 2,
            "by_source": {
                "ngram": {
                    "drafted": 6,
                    "accepted": 3,
                    "drafted_at": [3, 3],
                    "accepted_at": [2, 1],
                }
            },
        },
        "timings": {"queue_s": 0.25, "ttft_s": 0.5, "total_s": 1.5},
    }


async def test_json_says_what_ended_it() -> None:
    script = Script(reason=pb.FINISH_REASON_STOP, stop="END")
    async with serve(FakeServer(lambda _: script)) as fake:
        _, out, _ = await generate("x", "--target", fake.target, "--json")
    assert json.loads(out)["stop"] == "END"


@pytest.mark.parametrize("count", [0, 2])
async def test_json_has_logprobs_if_asked_for(count: int) -> None:
    async with serve(FakeServer()) as fake:
        arguments = ("x", "--target", fake.target, "--json", "--logprobs", str(count))
        code, out, _ = await generate(*arguments)
    assert code == 0
    assert fake.requests == [pb.GenerationParams(text="x", output=pb.Output(logprobs=count))]
    top = [{"token_id": i, "logprob": -0.5} for i in range(count)]
    assert json.loads(out)["logprobs"] == [
        {"token_id": i, "logprob": -1.5, "top": top} for i in (1, 2, 3, 4, 5)
    ]


async def test_the_prompt_is_printed_before_the_output_if_asked_for() -> None:
    async with serve(FakeServer()) as fake:
        code, out, err = await generate("a prompt", "--target", fake.target, "--echo")
    assert (code, out, err) == (0, "a prompt!" + DEFAULT_TEXT, "")
    assert fake.requests == [pb.GenerationParams(text="a prompt", output=pb.Output(echo=True))]


async def test_json_has_prompt_and_offsets_if_asked_for() -> None:
    options = ("--echo", "--prompt-logprobs", "0", "--text-offsets")
    async with serve(FakeServer()) as fake:
        code, out, _ = await generate("x", "--target", fake.target, "--json", *options)
    assert code == 0
    output = pb.Output(echo=True, prompt_logprobs=0, text_offsets=True)
    assert fake.requests == [pb.GenerationParams(text="x", output=output)]
    found = json.loads(out)
    assert (found["text"], found["prompt_text"]) == (DEFAULT_TEXT, "x!")
    assert found["prompt_token_ids"] == [9, 8, 7]
    assert found["text_offsets"] == [10, 20, 30, 40, 50]
    assert found["prompt_logprobs"] == [{"token_id": i, "logprob": -2.5, "top": []} for i in (1, 3)]


async def test_a_refusal_names_the_fields() -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="sampling.top_p", description="must be in (0, 1]")
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2))
    refused = status("INVALID_ARGUMENT", "bad request", bad, retry)
    async with serve(FakeServer(lambda _: Script(reject=refused))) as fake:
        code, out, err = await generate("x", "--target", fake.target, "--json")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "INVALID_ARGUMENT: bad request",
        "  sampling.top_p: must be in (0, 1]",
        "  try again in 2 s",
    ]


async def test_an_error_at_the_end_keeps_the_text_and_fails() -> None:
    script = Script(reason=pb.FINISH_REASON_ERROR, error=status("UNAVAILABLE", "engine died"))
    async with serve(FakeServer(lambda _: script)) as fake:
        code, out, err = await generate("x", "--target", fake.target)
    assert (code, out) == (1, DEFAULT_TEXT)
    assert err == "UNAVAILABLE: engine died\n"


async def test_a_server_that_stops_is_a_failure() -> None:
    script = Script(reason=pb.FINISH_REASON_DRAINED)
    async with serve(FakeServer(lambda _: script)) as fake:
        code, out, err = await generate("x", "--target", fake.target)
    assert (code, out) == (1, DEFAULT_TEXT)
    assert "DRAINED" in err


async def test_a_broken_stream_is_a_failure() -> None:
    async with serve(FakeServer(lambda _: Script(breaks=True))) as fake:
        code, _, err = await generate("x", "--target", fake.target)
    assert code == 1
    assert err == "UNAVAILABLE: going away\n"


async def test_nobody_there() -> None:
    async with serve(FakeServer()) as fake:
        pass
    code, out, err = await generate("x", "--target", fake.target)
    assert (code, out) == (1, "")
    assert err.startswith("UNAVAILABLE: ")


async def test_text_comes_before_the_end_and_ctrl_c_cancels() -> None:
    async with (
        asyncio.timeout(30),
        serve(FakeServer(lambda _: Script(hold=True))) as fake,
        started("x", "--target", fake.target) as process,
    ):
        assert process.stdout is not None
        shown = await process.stdout.readexactly(len(DEFAULT_TEXT.encode()))
        assert shown.decode() == DEFAULT_TEXT
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")
    assert fake.live == 0
    assert not fake.dropped.is_set()  # cancelled by the op, and the stream ended in order


async def test_ctrl_c_with_json_prints_what_came() -> None:
    async with (
        asyncio.timeout(30),
        serve(FakeServer(lambda _: Script(hold=True))) as fake,
        started("x", "--target", fake.target, "--json") as process,
    ):
        await fake.holding.acquire()
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    assert process.returncode == 130
    result = json.loads(out)
    assert (result["text"], result["finish_reason"]) == (DEFAULT_TEXT, "CANCELLED")
    assert result["usage"]["completion_tokens"] == 5


async def test_a_closed_pipe_hangs_up() -> None:
    """`generate | head -c 1` does not leave the generation running on the server."""
    endless = Script(deltas=(("x" * 4096, (1,)),) * 2000, hold=True)
    async with (
        asyncio.timeout(30),
        serve(FakeServer(lambda _: endless)) as fake,
        started("x", "--target", fake.target) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        await process.stdout.readexactly(1)
        process.stdout._transport.close()  # type: ignore[attr-defined]
        await fake.dropped.wait()
        assert await process.wait() != 0
        assert b"Traceback" not in await process.stderr.read()


async def test_wait_waits_until_it_is_serving() -> None:
    async with serve(FakeServer()) as fake:
        await fake.serving(False)
        async with started("x", "--target", fake.target, "--wait", "20") as process:
            await fake.health.watched.wait()
            assert fake.requests == []
            await fake.serving()
            out, _ = await process.communicate()
    assert (process.returncode, out.decode()) == (0, DEFAULT_TEXT)


async def test_wait_gives_up() -> None:
    async with serve(FakeServer()) as fake:
        await fake.serving(False)
        code, out, err = await generate("x", "--target", fake.target, "--wait", "0.3")
    assert (code, out) == (1, "")
    assert "not serving" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("x", "--max-tokens", str(2**31)),
        ("x", "--seed", "-1"),
        ("x", "--timeout", "inf"),
        ("x", "--timeout", "nan"),
        ("x", "--priority", "urgent"),
        ("x", "--frobnicate"),
        ("x", "--logprobs", "2"),
        ("x", "--prompt-logprobs", "0"),
        ("x", "--text-offsets"),
        ("x", "--json-schema", "/nowhere/schema.json"),
        ("x", "--json-schema", "schema.json"),
        ("x", "--grammar", "../nowhere.lark"),
        ("x", "y"),
        (),
    ],
)
async def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    code, out, err = await generate(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


async def test_a_prompt_that_is_not_utf8_is_wrong_usage() -> None:
    code, _, err = await generate("-", stdin=b"\xff\xfe")
    assert code == 2
    assert "Traceback" not in err


async def test_a_server_that_leaves_after_the_end_takes_nothing_with_it() -> None:
    script = Script(reason=pb.FINISH_REASON_DRAINED, leaves=True)
    async with serve(FakeServer(lambda _: script)) as fake:
        code, out, err = await generate("x", "--target", fake.target, "--json")
    assert json.loads(out)["token_ids"] == [1, 2, 3, 4, 5]
    assert (code, err) == (1, "the server ended the generation early: DRAINED\n")
