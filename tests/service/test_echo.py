"""The prompt, delivered ahead of the output to who asks for it; and places in the text."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tokenizers import Tokenizer, normalizers

import service.echo
from engine.client import EngineState
from engine.outcome import FinishReason
from service.pb import draftwire_pb2 as pb
from tests.service.fakes import text_of
from tests.service.harness import BOS, IM_END, IM_START, Harness, params_of, running, write_model

CLIENTS_ACCEPT = 4 << 20
HARD = "e\u0301 👨‍👩‍👧‍👦 東京 नमस्ते\u200d\n"


def asked(**output: Any) -> pb.Output:
    return pb.Output(echo=True, **output)


async def everywhere(served: Harness, params: pb.GenerationParams, steps: int) -> list[list[Any]]:
    """What comes of a generation in each method, the response of Complete as if it were a delta;
    the engine takes so many steps."""
    before, size = len(served.engine.requests), max(params.n, 1)
    session = await served.session()
    await session.send(generation_id="a", start=params)
    stream = served.generations.Generate(pb.GenerateRequest(params=params))
    whole = served.generations.Complete(pb.CompleteRequest(params=params))
    await served.engine.submitted(before + 3 * size)
    for _ in range(steps):
        served.engine.step()
    events: list[pb.Event] = []
    while sum(e.WhichOneof("event") == "finished" for e in events) < size:
        events.append(await session.event())
    responses = [response async for response in stream]
    return [*(_deltas(said) for said in (events, responses)), [await whole]]


def _deltas(events: Seq[Any]) -> list[pb.Delta]:
    """Checks that what is said of the prompt is said first, right after `accepted`."""
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    deltas = [e.delta for e, kind in zip(events, kinds, strict=True) if kind == "delta"]
    echoed = [bool(d.prompt_text or d.prompt_token_ids) for d in deltas]
    assert echoed == sorted(echoed, reverse=True)
    assert kinds[1 : 1 + sum(echoed)] == ["delta"] * sum(echoed)
    for delta in deltas[: sum(echoed)]:
        assert (delta.text, [*delta.token_ids], delta.seq, delta.index) == ("", [], 0, 0)
    return deltas


def echoed(deltas: Seq[Any]) -> tuple[str, list[int]]:
    text = "".join(delta.prompt_text for delta in deltas)
    return text, [i for delta in deltas for i in delta.prompt_token_ids]


async def test_a_text_comes_as_it_was_sent_in_all_three_methods(tmp_path: Path) -> None:
    """Also where the tokenizer makes another of it, and with the text of special tokens."""
    path = write_model(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(path))
    text = f"{IM_END}{HARD}{BOS}"
    async with running(tmp_path) as served:
        for deltas in await everywhere(served, params_of(text, max_tokens=3, output=asked()), 3):
            prompt = served.engine.requests[0].prompt
            assert tokenizer.decode(prompt, skip_special_tokens=False) != text
            assert echoed(deltas) == (text, list(prompt))
            assert "".join(delta.text for delta in deltas) == text_of(3)


@pytest.mark.parametrize("keep", [False, True])
async def test_token_ids_and_messages_come_decoded(served: Harness, keep: bool) -> None:
    output = asked(keep_special_tokens=keep)
    stopping = pb.Stopping(max_tokens=1)
    messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=HARD)])
    for deltas in await everywhere(
        served, pb.GenerationParams(messages=messages, stopping=stopping, output=output), 1
    ):
        chat = served.engine.requests[-1].prompt
        said = f"{BOS}{IM_START}user\n{HARD}{IM_END}\n{IM_START}assistant\n"
        if not keep:
            said = said.replace(BOS, "").replace(IM_START, "").replace(IM_END, "")
        assert echoed(deltas) == (said, list(chat))
    # It begins and ends within characters: the text is valid UTF-8 all the same.
    tokens = await served.models.Tokenize(pb.TokenizeRequest(text="東京"))
    ids = [*tokens.token_ids[1:-1], 256]
    cut = pb.TokenIds(ids=ids)
    for deltas in await everywhere(
        served, pb.GenerationParams(token_ids=cut, stopping=stopping, output=output), 1
    ):
        assert echoed(deltas) == ("\ufffd" * 3 + BOS * keep, ids)


async def test_nothing_unless_asked_for(served: Harness) -> None:
    for deltas in await everywhere(served, params_of(max_tokens=2), 2):
        assert echoed(deltas) == ("", [])
        assert len(deltas) <= 2
        assert not any(delta.text_offsets for delta in deltas)


async def test_the_first_of_several_samples_has_it(served: Harness) -> None:
    params = params_of("ab", n=3, max_tokens=2, output=asked(text_offsets=True))
    session, stream, (whole,) = await everywhere(served, params, 2)
    ids = list(served.engine.requests[0].prompt)
    for deltas in (session, stream):
        assert echoed(deltas) == ("ab", ids)  # once, and `_deltas` has seen that its index is 0
        for index in range(3):
            assert [i for d in deltas if d.index == index for i in d.text_offsets] == [0, 2]
    assert [echoed([sample]) for sample in (whole, *whole.samples)] == [
        ("ab", ids),
        *[("", [])] * 2,
    ]
    assert [list(sample.text_offsets) for sample in (whole, *whole.samples)] == [[0, 2]] * 3


async def test_a_text_is_scored_without_generating(served: Harness) -> None:
    output = asked(prompt_logprobs=1)
    params = pb.GenerationParams(text=HARD, prefill_only=True, output=output)
    for deltas in await everywhere(served, params, 1):
        text, ids = echoed(deltas)
        assert text == HARD
        scored = [entry.token_id for delta in deltas for entry in delta.prompt_logprobs]
        assert scored == ids[1:]
        assert not any(delta.text or delta.token_ids for delta in deltas)


async def test_it_comes_however_the_generation_ends(served: Harness) -> None:
    session = await served.session()
    await session.start("a", text=HARD, output=asked(), max_tokens=5)
    await session.event("accepted")
    await session.cancel("a")  # in the queue: nothing has been computed
    events = (await session.until_finished("a"))["a"]
    assert echoed([events[0].delta])[0] == HARD
    assert events[1].finished.reason == pb.FINISH_REASON_CANCELLED
    params = params_of(HARD, max_tokens=5, output=asked())
    stream = served.generations.Generate(pb.GenerateRequest(params=params))
    request = (await served.engine.submitted(2))[-1]
    served.engine.end(request.id, FinishReason.EOS)
    assert echoed(_deltas([response async for response in stream]))[0] == HARD


async def test_a_deadline_without_output_is_no_echo_alone(served: Harness) -> None:
    params = params_of(HARD, max_tokens=5, timeout=Duration(seconds=60), output=asked())
    whole = served.generations.Complete(pb.CompleteRequest(params=params))
    request = (await served.engine.submitted())[0]
    served.engine.end(request.id, FinishReason.DEADLINE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await whole
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_what_is_refused_has_none(served: Harness) -> None:
    session = await served.session()
    await session.start("a", text="x" * 5000, output=asked())
    assert (await session.event("rejected")).generation_id == "a"
    served.engine.state = EngineState.RESTARTING
    await session.start("b", output=asked())
    assert (await session.event("rejected")).generation_id == "b"
    await session.call.done_writing()
    await session.done()
    assert sum(len(frame.events) for frame in session.frames) == 2


async def test_a_long_prompt_in_messages_that_clients_accept(model_dir: Path) -> None:
    """A mebibyte of text, as many tokens, through clients with gRPC's own limits."""
    text = "".join(f"{i} řádek 👍🏽\n" for i in range(1 << 17))
    text = text.encode()[: 1 << 20].decode(errors="ignore")
    info = {"context_limit": 1 << 21, "num_blocks": 1 << 17}
    async with running(model_dir, info=info, max_waiting_tokens=1 << 23) as served:
        params = params_of(text, max_tokens=1, output=asked())
        session, stream, (whole,) = await everywhere(served, params, 1)
        ids = list(served.engine.requests[0].prompt)
        assert len(ids) >= 1 << 19
        for deltas in (session, stream, [whole]):
            assert echoed(deltas) == (text, ids)
        assert max(delta.ByteSize() for delta in session) < 1 << 20
        assert whole.ByteSize() < CLIENTS_ACCEPT
        frames = await served.session()
        await frames.send(generation_id="a", start=params)
        await frames.event("accepted")
        served.engine.step()
        await frames.until_finished("a")
        assert max(frame.ByteSize() for frame in frames.frames) < CLIENTS_ACCEPT // 2


@pytest.mark.parametrize("piece", [1, 2, 5, 64])
async def test_pieces_are_whole_characters(
    served: Harness, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.echo, "PIECE", piece)
    session, stream, _ = await everywhere(served, params_of(HARD, max_tokens=1, output=asked()), 1)
    ids = list(served.engine.requests[0].prompt)
    for deltas in (session, stream):
        assert echoed(deltas) == (HARD, ids)
        assert max(len(delta.prompt_text) for delta in deltas) == min(piece, len(HARD))
        assert max(len(delta.prompt_token_ids) for delta in deltas) == min(piece, len(ids))


async def test_the_log_says_nothing_of_it(served: Harness) -> None:
    await everywhere(served, params_of("secret", max_tokens=1, output=asked()), 1)
    assert "secret" not in json.dumps(served.logged())


async def test_as_many_offsets_as_ids_in_all_three_methods(served: Harness) -> None:
    output = pb.Output(text_offsets=True)
    for deltas in await everywhere(served, params_of(max_tokens=12, output=output), 12):
        for delta in deltas:
            assert len(delta.text_offsets) == len(delta.token_ids)
        offsets = [i for delta in deltas for i in delta.text_offsets]
        assert offsets == [len(text_of(i)) for i in range(12)]
    assert all(request.output.text_offsets for request in served.engine.requests)
