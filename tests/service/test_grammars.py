"""Grammars before admission: what is wrong is INVALID_ARGUMENT by field, and stalls nobody."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.request import GrammarParams
from service.grammars import MOST_WAITING, GrammarChecks
from service.pb import draftwire_pb2 as pb
from service.status import Reason, Refused
from tests.service.harness import Harness, fields_of, model_info, rich, running

G, C = pb.Grammar, pb.Choice

BAD: list[tuple[pb.Grammar, str, str]] = [
    (G(), "grammar", "is required"),
    (G(json_schema=""), "grammar.json_schema", "must not be empty"),
    (G(regex=""), "grammar.regex", "must not be empty"),
    (G(lark=""), "grammar.lark", "must not be empty"),
    (G(choice=C()), "grammar.choice.options", "1 to 1024 entries"),
    (G(choice=C(options=["a"] * 1025)), "grammar.choice.options", "1 to 1024 entries"),
    (G(choice=C(options=["a", ""])), "grammar.choice.options[1]", "must not be empty"),
    (G(choice=C(options=["ř" * 20000] * 2)), "grammar.choice.options", "over the limit"),
    (G(json_schema='"' + "x" * 65535 + '"'), "grammar.json_schema", "over the limit of 65536"),
    (G(regex="x" * 65537), "grammar.regex", "over the limit of 65536"),
    (G(lark="ř" * 32769), "grammar.lark", "over the limit of 65536"),
    (G(json_schema="{"), "grammar.json_schema", "no JSON"),
    (G(regex="[0-9"), "grammar.regex", "unclosed character class"),
    (G(json_schema="[1]"), "grammar.json_schema", "neither a JSON object"),
    (G(json_schema="false"), "grammar.json_schema", "neither a JSON object"),
    (G(json_schema='{"type": "nope"}'), "grammar.json_schema", "Invalid type"),
    (
        G(json_schema='{"type":"array","items":' * 3000 + "{}" + "}" * 3000),
        "grammar.json_schema",
        "",
    ),
    (G(json_schema='{"not": {}}'), "grammar.json_schema", "Unimplemented"),
    (G(regex="[a"), "grammar.regex", "invalid regex"),
    (G(regex="(" * 30000 + ")" * 30000), "grammar.regex", ""),
    (G(lark="start: nothing"), "grammar.lark", "unknown name"),
    (G(lark="\x00\x01"), "grammar.lark", ""),
]
GOOD = [
    G(json_schema='{"type": "object", "properties": {"a": {"type": "string"}}}'),
    G(json_schema="{}"),
    G(regex="(a|b)*c{3,5}"),
    G(lark='start: "a" | start "b"'),
    G(choice=C(options=["yes", "no", "no"])),
    G(choice=C(options=['"', "\\", "\n", "\x7f", "\u2028", "😀", "//", "#", "'", "</s>"])),
    G(choice=C(options=[f"option {i}" for i in range(1024)])),
]


async def test_the_table_in_all_three_methods(model_dir: Path) -> None:
    async with running(model_dir) as served:
        session = await served.session()
        for grammar, field, cause in BAD:
            params = pb.GenerationParams(text="hi", grammar=grammar)
            await session.send(generation_id="bad", start=params)
            rejected = (await session.event("rejected")).rejected
            assert fields_of(rejected) == [f"start.{field}"]
            assert cause in rejected.message, rejected.message
            for call in (
                served.generations.Generate(pb.GenerateRequest(params=params)),
                served.generations.Complete(pb.CompleteRequest(params=params)),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (call if hasattr(call, "__await__") else call.read())
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert fields_of(rich(caught.value)) == [f"params.{field}"]
        assert served.engine.requests == []
        for row, grammar in enumerate(GOOD):
            start = pb.GenerationParams(text="hi", grammar=grammar)
            await session.send(generation_id=str(row), start=start)
            await session.event("accepted")
    sent = [request.grammar for request in served.engine.requests]
    assert [g.kind for g in sent if g] == ["json_schema"] * 2 + ["regex"] + ["lark"] * 4
    assert sent[4] == GrammarParams("lark", 'start: "yes" | "no"')


async def test_with_ignore_eos_it_goes_on_as_long_as_it_may(served: Harness) -> None:
    session = await served.session()
    for name, ignore in (("a", False), ("b", True)):
        start = pb.GenerationParams(text="hi", grammar=G(regex="a+"))
        start.stopping.ignore_eos = ignore
        await session.send(generation_id=name, start=start)
        await session.event("accepted")
    first, second = served.engine.requests
    assert first.grammar == GrammarParams("regex", "a+")
    assert second.grammar == GrammarParams("regex", "a+", longest=True)
    assert first.stopping.eos_ids == second.stopping.eos_ids == {258}


async def test_a_model_that_cannot_end_has_no_grammars(model_dir: Path) -> None:
    async with running(model_dir, info={"eos_ids": ()}) as served:
        session = await served.session()
        start = pb.GenerationParams(text="hi", grammar=G(regex="a+"))
        await session.send(generation_id="a", start=start)
        assert fields_of((await session.event("rejected")).rejected) == ["start.grammar"]


async def test_what_is_unused_is_not_started(served: Harness) -> None:
    session = await served.session()
    await session.start("a")
    await session.event("accepted")
    assert served.server._grammars._process is None


def checker(tmp_path: Path, body: str) -> tuple[str, ...]:
    """A process in the place of the checker; `body` answers each `question`."""
    script = tmp_path / "checker.py"
    lines = textwrap.indent(textwrap.dedent(body), "    ")
    script.write_text(
        "import json, os, sys, time\n"
        "say = lambda text: print(json.dumps(text), flush=True)\n"
        "say('')\n"
        f"for line in sys.stdin:\n    question = json.loads(line)[1]\n{lines}"
    )
    return sys.executable, str(script)


async def wrong(checks: GrammarChecks, text: str, info: Any) -> str:
    try:
        await checks.check(GrammarParams("regex", text), "x.regex", info)
    except Refused as refusal:
        return refusal.status.message if refusal.reason is Reason.INVALID_REQUEST else "?"
    return ""


async def test_what_is_slow_or_kills_the_checker_is_refused_and_the_next_is_served(
    model_dir: Path, tmp_path: Path
) -> None:
    body = """
    if question == "slow": time.sleep(60)
    if question == "deadly": os._exit(1)
    say("bad" if question == "bad" else "")
    """
    checks = GrammarChecks(checker(tmp_path, body), compile_s=1.0)
    info = model_info(model_dir)
    start = time.monotonic()
    assert "longer than 1 s" in await wrong(checks, "slow", info)
    assert "memory" in await wrong(checks, "deadly", info)
    assert await wrong(checks, "bad", info) == "x.regex: bad"
    assert await wrong(checks, "good", info) == ""
    assert time.monotonic() - start < 20
    process = checks._process
    await checks.close()
    assert process is not None
    assert process.returncode is not None


async def test_what_is_known_is_not_asked_again(model_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = f"""
    open({str(log)!r}, "a").write(question + "\\n")
    say("bad" if question == "bad" else "")
    """
    checks = GrammarChecks(checker(tmp_path, body))
    info = model_info(model_dir)
    for _ in range(3):
        assert await wrong(checks, "bad", info) == "x.regex: bad"
        assert await wrong(checks, "good", info) == ""
    together = await asyncio.gather(*(wrong(checks, "other", info) for _ in range(9)))
    assert together == [""] * 9
    await checks.close()
    assert log.read_text().split() == ["bad", "good", "other"]


async def test_a_caller_that_goes_leaves_no_answer_behind(model_dir: Path, tmp_path: Path) -> None:
    body = """
    time.sleep(0.2)
    say("bad" if question == "bad" else "")
    """
    checks = GrammarChecks(checker(tmp_path, body))
    info = model_info(model_dir)
    assert await wrong(checks, "first", info) == ""
    gone = asyncio.create_task(wrong(checks, "bad", info))
    await asyncio.sleep(0.05)
    gone.cancel()
    assert await wrong(checks, "good", info) == ""
    assert await wrong(checks, "bad", info) == "x.regex: bad"
    await checks.close()


async def test_many_new_grammars_at_once_are_pushed_back(model_dir: Path, tmp_path: Path) -> None:
    checks = GrammarChecks(checker(tmp_path, "time.sleep(60)"), compile_s=30.0)
    info = model_info(model_dir)
    waiting = [asyncio.create_task(wrong(checks, str(i), info)) for i in range(MOST_WAITING)]
    await asyncio.sleep(0.05)
    with pytest.raises(Refused) as caught:
        await checks.check(GrammarParams("regex", "more"), "x", info)
    assert caught.value.reason is Reason.QUEUE_FULL
    await checks.close()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in done)


async def test_a_checker_that_does_not_start_is_no_fault_of_the_caller(model_dir: Path) -> None:
    checks = GrammarChecks((sys.executable, "-c", "pass"))
    with pytest.raises(RuntimeError, match="does not start"):
        await checks.check(GrammarParams("regex", "a"), "x", model_info(model_dir))
    await checks.close()


async def test_a_heavy_schema_is_cut_off_by_the_real_checker(model_dir: Path) -> None:
    """Its patterns are compared each with each: minutes."""
    many = {f"^a{i}[a-z]*$": {"type": "integer"} for i in range(1500)}
    schema = json.dumps({"type": "object", "patternProperties": many})
    checks = GrammarChecks(compile_s=0.3)
    info = model_info(model_dir)
    with pytest.raises(Refused, match="takes longer"):
        await checks.check(GrammarParams("json_schema", schema), "x", info)
    await checks.close()
