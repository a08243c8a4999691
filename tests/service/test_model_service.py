"""ModelService and reflection."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2 as reflection

from service.checks import MAX_DETOKENIZE_IDS
from service.pb import draftwire_pb2 as pb
from service.tokenize import TextCodec
from tests.service.harness import CHAT_TEMPLATE, Harness, fields_of, rich


async def test_model_info_says_what_is_served(served: Harness) -> None:
    info = await served.models.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.architecture) == ("scripted", "ScriptedForCausalLM")
    assert (info.context_limit, info.vocab_size, list(info.eos_token_ids)) == (4096, 300, [258])
    assert (info.dtype, info.device, info.fingerprint) == ("float32", "cpu", "f00d")
    assert (info.strict, info.not_strict_because, info.kv_dtype) == (False, "scripted", "int8")
    assert (list(info.draft_sources), info.max_draft_tokens) == (["ngram"], 6)
    assert info.kv_capacity_tokens == 16 * 512
    assert info.chat
    assert info.limits == pb.Limits(
        max_stop_strings=16,
        max_stop_length=256,
        max_generations_per_session=256,
        max_message_bytes=4 << 20,
    )


async def test_tokenize_is_what_a_generation_sees(served: Harness) -> None:
    text = "for i in   range\t"
    answer = await served.models.Tokenize(pb.TokenizeRequest(text=text))
    messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    chat = await served.models.Tokenize(pb.TokenizeRequest(messages=messages))
    session = await served.session()
    await session.start("a", text=text)
    await session.send(generation_id="b", start=pb.GenerationParams(messages=messages))
    requests = await served.engine.submitted(2)
    assert [tuple(answer.token_ids), tuple(chat.token_ids)] == [r.prompt for r in requests]
    assert "add_generation_prompt" in CHAT_TEMPLATE
    back = await served.models.Detokenize(
        pb.DetokenizeRequest(token_ids=chat.token_ids, keep_special_tokens=True)
    )
    assert back.text == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    plain = await served.models.Detokenize(pb.DetokenizeRequest(token_ids=chat.token_ids))
    assert plain.text == "user\nhi\nassistant\n"


async def test_detokenize_ids_in_the_padding_of_the_vocabulary(served: Harness) -> None:
    """Ids that the model has and the tokenizer has not are valid and have no text."""
    answer = await served.models.Detokenize(pb.DetokenizeRequest(token_ids=[299, 64]))
    assert answer.text == "a"
    assert (await served.models.Detokenize(pb.DetokenizeRequest())).text == ""


async def test_ids_over_the_limit_are_refused_before_they_are_looked_at(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_ids(*_: Any) -> None:
        raise AssertionError("must not be called")

    monkeypatch.setattr("service.model_service.check_ids", check_ids)
    for count in (MAX_DETOKENIZE_IDS + 1, 4_100_000):  # the latter just fits a message
        request = pb.DetokenizeRequest.FromString(_packed(count))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.models.Detokenize(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_of(rich(caught.value)) == ["token_ids"]
        assert "limit of 131072" in rich(caught.value).message


def _packed(count: int) -> bytes:
    """A DetokenizeRequest of `count` times the id 64, quickly."""
    one = pb.DetokenizeRequest(token_ids=[64]).SerializeToString()
    length, size = b"", count
    while size >= 128:
        length += bytes([size & 127 | 128])
        size >>= 7
    return one[:1] + length + bytes([size]) + one[-1:] * count


@pytest.mark.parametrize(("count", "inline"), [(1, True), (256, True), (MAX_DETOKENIZE_IDS, False)])
async def test_many_ids_are_decoded_off_the_loop(
    served: Harness, monkeypatch: pytest.MonkeyPatch, count: int, inline: bool
) -> None:
    threads = []
    decode = TextCodec._decode

    def noted(self: TextCodec, ids: Any, skip_special_tokens: bool) -> str:
        threads.append(threading.get_ident())
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(TextCodec, "_decode", noted)
    answer = await served.models.Detokenize(pb.DetokenizeRequest.FromString(_packed(count)))
    assert answer.text == "a" * count
    assert [thread == threading.get_ident() for thread in threads] == [inline]


@pytest.mark.parametrize(
    ("method", "request_", "fields"),
    [
        ("Tokenize", pb.TokenizeRequest(), ["prompt"]),
        ("Tokenize", pb.TokenizeRequest(text=""), ["text"]),
        ("Tokenize", pb.TokenizeRequest(messages=pb.ChatMessages()), ["messages.messages"]),
        (
            "Tokenize",
            pb.TokenizeRequest(
                messages=pb.ChatMessages(messages=[pb.ChatMessage(role="x", content="y")])
            ),
            ["messages"],
        ),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, -1]), ["token_ids[1]"]),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[300]), ["token_ids[0]"]),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[2**62]), ["token_ids[0]"]),
    ],
)
async def test_bad_requests_are_refused_by_field(
    served: Harness, method: str, request_: Any, fields: list[str]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(served.models, method)(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields_of(rich(caught.value)) == fields


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_everything_a_client_needs(
    served: Harness, version: str
) -> None:
    call = served.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection.ServerReflectionResponse.FromString,
    )()
    await call.write(reflection.ServerReflectionRequest(list_services=""))
    names = {s.name for s in (await call.read()).list_services_response.service}
    assert {"draftwire.v1.GenerationService", "draftwire.v1.ModelService"} < names
    assert "grpc.health.v1.Health" in names
    for name in names:
        await call.write(reflection.ServerReflectionRequest(file_containing_symbol=name))
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        described = {FileDescriptorProto.FromString(raw).name for raw in files}
        assert described, name
        if name.startswith("draftwire"):
            assert {"google/rpc/status.proto", "google/protobuf/duration.proto"} < described
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
