"""Logprobs on the wire: as many as ids in each message, in all three methods."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.outcome import Finish, FinishReason, TokenChunk
from service.pb import draftwire_pb2 as pb
from tests.service.fakes import logprobs_of, text_of
from tests.service.harness import Harness, flood, params_of, running


def asked(count: int, **params: Any) -> dict[str, Any]:
    return {"output": pb.Output(logprobs=count), **params}


def check(ids: Iterable[int], logprobs: Iterable[pb.TokenLogprobs], count: int) -> None:
    wanted = logprobs_of(tuple(ids), count)
    for entry, (token, logprob, top, values) in zip(logprobs, wanted, strict=True):
        assert (entry.token_id, entry.logprob) == (token, logprob)
        assert [(t.token_id, t.logprob) for t in entry.top] == list(zip(top, values, strict=True))


@pytest.mark.parametrize("count", [0, 1, 20])
async def test_as_many_as_ids_in_all_three_methods(served: Harness, count: int) -> None:
    params = asked(count, max_tokens=9)
    session = await served.session()
    await session.start("a", **params)
    stream = served.generations.Generate(pb.GenerateRequest(params=params_of(**params)))
    whole = served.generations.Complete(pb.CompleteRequest(params=params_of(**params)))
    await served.engine.submitted(3)
    served.engine.step(2)
    served.engine.step(7)
    events = (await session.until_finished("a"))["a"]
    deltas = [e.delta for e in events if e.WhichOneof("event") == "delta"]
    deltas += [r.delta async for r in stream if r.WhichOneof("event") == "delta"]
    for delta in deltas:
        check(delta.token_ids, delta.logprobs, count)
    assert sum(len(delta.logprobs) for delta in deltas) == 18
    response = await whole
    check(range(9), response.logprobs, count)


@pytest.mark.parametrize("tokens", [0, 3])
async def test_those_of_the_prompt_in_all_three_methods(served: Harness, tokens: int) -> None:
    prompt = pb.TokenIds(ids=range(5, 5 + 40))
    params = pb.GenerationParams(
        token_ids=prompt,
        prefill_only=not tokens,
        stopping=pb.Stopping(max_tokens=tokens),
        output=pb.Output(prompt_logprobs=2),
    )
    session = await served.session()
    await session.send(generation_id="a", start=params)
    stream = served.generations.Generate(pb.GenerateRequest(params=params))
    whole = served.generations.Complete(pb.CompleteRequest(params=params))
    await served.engine.submitted(3)
    for _ in range(max(tokens, 1)):
        served.engine.step()
    events = (await session.until_finished("a"))["a"]
    for deltas in (
        [e.delta for e in events if e.WhichOneof("event") == "delta"],
        [r.delta async for r in stream if r.WhichOneof("event") == "delta"],
        [await whole],
    ):
        assert not any(delta.logprobs for delta in deltas)
        assert sum(len(delta.token_ids) for delta in deltas) == tokens
        check(prompt.ids[1:], [entry for d in deltas for entry in d.prompt_logprobs], 2)


async def test_a_delta_may_hold_those_of_the_prompt_alone(served: Harness) -> None:
    session = await served.session()
    await session.start("a", max_tokens=5, output=pb.Output(prompt_logprobs=0))
    await session.event("accepted")
    (request,) = served.engine.requests
    told = logprobs_of(request.prompt[1:], 0)
    served.engine.listener.deliver([TokenChunk(request.id, 0, (), "", prompt_logprobs=told)])
    delta = (await session.event("delta")).delta
    assert (delta.text, list(delta.token_ids), delta.seq) == ("", [], 0)
    check(request.prompt[1:], delta.prompt_logprobs, 0)


async def test_none_unless_asked_for(served: Harness) -> None:
    call = served.generations.Complete(pb.CompleteRequest(params=params_of(max_tokens=3)))
    await served.engine.submitted()
    served.engine.step(3)
    response = await call
    assert len(response.token_ids) == 3
    assert not response.logprobs


async def test_cancelled(served: Harness) -> None:
    session = await served.session()
    await session.start("a", **asked(2, max_tokens=50))
    await session.event("accepted")
    served.engine.step(7)
    delta = (await session.event("delta")).delta
    check(delta.token_ids, delta.logprobs, 2)
    await session.cancel("a")
    finished = (await session.until_finished("a"))["a"][-1].finished
    assert finished.usage.completion_tokens == 7


async def test_what_piled_up_leaves_in_messages_that_clients_accept(model_dir: Path) -> None:
    """6 MiB of logprobs of one generation, whose reader was away."""
    async with running(model_dir, info={"context_limit": 1 << 17, "num_blocks": 1 << 14}) as served:
        client = await served.session()
        await client.start("blocker", max_tokens=4000)
        blocker = (await served.engine.submitted())[0]
        await flood(served, blocker.id)
        await client.start("a", **asked(20, max_tokens=20_000))
        await served.engine.submitted(2)
        served.engine.end(blocker.id, FinishReason.EOS)
        for _ in range(200):
            served.engine.step(100)
        events = (await client.until_finished("blocker", "a"))["a"]
        assert max(frame.ByteSize() for frame in client.frames) < 2 << 20
        deltas = [e.delta for e in events if e.WhichOneof("event") == "delta"]
        assert len(deltas) < 60  # and not 200: they were merged
        for delta in deltas:
            check(delta.token_ids, delta.logprobs, 20)
        assert "".join(delta.text for delta in deltas) == text_of(20_000)
        assert deltas[-1].seq == 20_000


@pytest.mark.parametrize("count", [None, 0, 3])
def test_they_cross_the_process_line(count: int | None) -> None:
    told = () if count is None else logprobs_of((1, 2), count)
    chunk = TokenChunk("a", 5, (1, 2), "x", Finish(FinishReason.EOS), told, told[:1], (3, 4))
    assert pickle.loads(pickle.dumps(chunk)) == chunk
