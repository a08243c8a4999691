"""Every bad request gets INVALID_ARGUMENT with the fields that are wrong, and harms nobody."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.request import OutputParams
from service.checks import MAX_MESSAGES, Limits, Violations, check_messages
from service.pb import draftwire_pb2 as pb
from service.status import MAX_VIOLATIONS, Refused
from service.tokenize import TextCodec
from tests.service.fakes import TIMEOUT_S, text_of
from tests.service.harness import Harness, details, fields_of, rich, running

VOCAB = 300
CONTEXT = 512
LONGEST_S = 315_576_000_000  # of a Duration
NAN, INF = math.nan, math.inf
S, T, P, O = pb.Sampling, pb.Stopping, pb.Speculation, pb.Output  # noqa: E741
USER = pb.ChatMessage(role="user", content="hi")


def ids(*values: int) -> dict[str, Any]:
    return {"text": None, "token_ids": pb.TokenIds(ids=values)}


def chat(*messages: pb.ChatMessage) -> dict[str, Any]:
    return {"text": None, "messages": pb.ChatMessages(messages=messages)}


def stop(*strings: str) -> dict[str, Any]:
    return {"stopping": T(stop=strings)}


BAD: list[tuple[dict[str, Any], list[str]]] = [
    # the prompt
    ({"text": None}, ["prompt"]),
    ({"text": ""}, ["text"]),
    ({"text": "x" * 5000}, ["text"]),
    (ids(), ["token_ids.ids"]),
    (ids(-1), ["token_ids.ids[0]"]),
    (ids(1, 2, VOCAB), ["token_ids.ids[2]"]),
    (ids(2**31 - 1), ["token_ids.ids[0]"]),
    (ids(0, 2**63 - 1), ["token_ids.ids[1]"]),
    (ids(-(2**63)), ["token_ids.ids[0]"]),
    (ids(*[0] * (CONTEXT + 1)), ["token_ids.ids"]),
    (ids(*[0] * CONTEXT), ["token_ids.ids"]),  # no room for one token
    (chat(), ["messages.messages"]),
    (chat(USER, pb.ChatMessage(content="x")), ["messages.messages[1].role"]),
    (chat(pb.ChatMessage(role="wizard", content="x")), ["messages"]),
    (chat(pb.ChatMessage(role="user", content="x" * 5000)), ["messages"]),
    # sampling
    *[
        ({"sampling": S(temperature=v)}, ["sampling.temperature"])
        for v in (NAN, INF, -INF, -1e-9, -1)
    ],
    *[
        ({"sampling": S(top_p=v)}, ["sampling.top_p"])
        for v in (NAN, INF, -INF, -1e-9, 0, -0.0, 1.000001)
    ],
    *[({"sampling": S(min_p=v)}, ["sampling.min_p"]) for v in (NAN, INF, -INF, -1e-9, 1.000001)],
    *[({"sampling": S(top_k=v)}, ["sampling.top_k"]) for v in (-1, -(2**31))],
    *[
        ({"sampling": S(repetition_penalty=v)}, ["sampling.repetition_penalty"])
        for v in (NAN, INF, 0, -1, 10.001)
    ],
    *[
        ({"sampling": S(**{name: v})}, [f"sampling.{name}"])
        for name in ("presence_penalty", "frequency_penalty")
        for v in (NAN, INF, -INF, 2.001, -2.001)
    ],
    *[({"sampling": S(typical_p=v)}, ["sampling.typical_p"]) for v in (NAN, 0, -1, 1.000001)],
    *[
        ({"sampling": S(logit_bias={token: value})}, [f"sampling.logit_bias[{token}]"])
        for token, value in [(-1, 0), (VOCAB, 0), (2**63 - 1, 0), (1, NAN), (1, INF), (1, -100.1)]
    ],
    (
        {"sampling": S(logit_bias={i: 1.0 for i in range(4097)})},
        ["sampling.logit_bias"],
    ),
    ({"sampling": S(allowed_token_ids=pb.TokenIds())}, ["sampling.allowed_token_ids.ids"]),
    (
        {"sampling": S(allowed_token_ids=pb.TokenIds(ids=[1, VOCAB]))},
        ["sampling.allowed_token_ids.ids[1]"],
    ),
    ({"sampling": S(banned_token_ids=[-1])}, ["sampling.banned_token_ids[0]"]),
    ({"sampling": S(banned_token_ids=[0] * (VOCAB + 1))}, ["sampling.banned_token_ids"]),
    ({"sampling": S(banned_token_ids=range(VOCAB))}, ["sampling.banned_token_ids"]),
    (
        {"sampling": S(allowed_token_ids=pb.TokenIds(ids=[1, 2]), banned_token_ids=[2, 1])},
        ["sampling.banned_token_ids"],
    ),
    ({"sampling": S(bad_words=["ok", " "])}, ["sampling.bad_words[1]"]),
    ({"sampling": S(bad_words=["x" * 257])}, ["sampling.bad_words[0]"]),
    ({"sampling": S(bad_words=["x"] * 257)}, ["sampling.bad_words"]),
    # forced_text
    ({"forced_text": "x", "prefill_only": True}, ["forced_text"]),
    ({"forced_text": "x" * 5000}, ["forced_text"]),
    ({"forced_text": "some words", "stopping": T(max_tokens=1)}, ["forced_text"]),
    # stopping
    *[({"stopping": T(min_tokens=v)}, ["stopping.min_tokens"]) for v in (-1, -(2**31), 2**31 - 1)],
    ({"stopping": T(min_tokens=9, max_tokens=8)}, ["stopping.min_tokens"]),
    ({"stopping": T(min_tokens=1), "prefill_only": True}, ["stopping.min_tokens"]),
    *[({"stopping": T(max_tokens=v)}, ["stopping.max_tokens"]) for v in (0, -1, -(2**31))],
    ({"stopping": T(max_tokens=CONTEXT - 1)}, ["stopping.max_tokens"]),  # prompt of 2
    ({"stopping": T(max_tokens=2**31 - 1)}, ["stopping.max_tokens"]),
    ({"stopping": T(max_tokens=1), "prefill_only": True}, ["stopping.max_tokens"]),
    ({"stopping": T(stop_token_ids=[0, VOCAB])}, ["stopping.stop_token_ids[1]"]),
    ({"stopping": T(stop_token_ids=[-1])}, ["stopping.stop_token_ids[0]"]),
    ({"stopping": T(stop_token_ids=[0] * 1025)}, ["stopping.stop_token_ids"]),
    (stop(*"abcde"), ["stopping.stop"]),
    (stop("ok", ""), ["stopping.stop[1]"]),
    (stop("x" * 33), ["stopping.stop[0]"]),
    # output
    *[({"output": O(logprobs=v)}, ["output.logprobs"]) for v in (-1, 21, 2**31 - 1, -(2**31))],
    *[({"output": O(prompt_logprobs=v)}, ["output.prompt_logprobs"]) for v in (-1, 21)],
    ({"output": O(processed_logprobs=True)}, ["output.processed_logprobs"]),
    # samples
    *[({"n": v}, ["n"]) for v in (0, -1, 17, 2**31 - 1)],
    ({"n": 2, "prefill_only": True}, ["n"]),
    # cache_salt, speculation, priority, timeout
    ({"cache_salt": "s" * 257}, ["cache_salt"]),
    ({"speculation": P(max_draft_tokens=-1)}, ["speculation.max_draft_tokens"]),
    ({"speculation": P(sources=["ngram", "magic"])}, ["speculation.sources[1]"]),
    ({"speculation": P(sources=["ngram"] * 33)}, ["speculation.sources"]),
    ({"priority": 9}, ["priority"]),
    *[
        ({"timeout": Duration(seconds=s, nanos=n)}, ["timeout"])
        for s, n in [
            (0, 0),
            (-1, 0),
            (0, -1),
            (1, 2**31 - 1),
            (1, -5),
            (2**62, 0),
            (LONGEST_S, 1),
            (LONGEST_S, 999_999_999),
            (LONGEST_S + 1, 0),
        ]
    ],
    # all that is wrong is said at once
    (
        {
            "text": "",
            "sampling": S(temperature=NAN, top_p=0, min_p=2, top_k=-1),
            "stopping": T(max_tokens=0, stop=[""], stop_token_ids=[-1]),
            "speculation": P(sources=["magic"]),
            "priority": 7,
        },
        [
            "text",
            "sampling.temperature",
            "sampling.top_k",
            "sampling.top_p",
            "sampling.min_p",
            "stopping.stop[0]",
            "stopping.stop_token_ids[0]",
            "stopping.max_tokens",
            "speculation.sources[0]",
            "priority",
        ],
    ),
]


def build(fields: dict[str, Any]) -> pb.GenerationParams:
    return pb.GenerationParams(**{"text": "hi", **fields})


@pytest_asyncio.fixture
async def small(model_dir: Path) -> AsyncIterator[Harness]:
    limits = {"max_prompt_bytes": 4096, "max_stop_strings": 4, "max_stop_length": 32}
    async with running(model_dir, info={"context_limit": CONTEXT}, **limits) as harness:
        yield harness


async def test_the_table_in_all_three_methods_beside_a_running_stream(small: Harness) -> None:
    """On one server and one session, so that every row is also a neighbour of the others."""
    witness = await small.session()
    await witness.start("witness", max_tokens=400)
    await small.engine.submitted()
    session = await small.session()
    for row, (fields, expected) in enumerate(BAD):
        params = build(fields)
        await session.send(generation_id="bad", start=params)
        event = await session.event("rejected")
        assert event.rejected.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert fields_of(event.rejected) == [f"start.{path}" for path in expected], row
        assert details(event.rejected)["ErrorInfo"] == {
            "reason": "INVALID_REQUEST",
            "domain": "draftwire",
        }
        for call in (
            small.generations.Generate(pb.GenerateRequest(params=params)),
            small.generations.Complete(pb.CompleteRequest(params=params)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if hasattr(call, "__await__") else call.read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert fields_of(rich(caught.value)) == [f"params.{path}" for path in expected], row
        small.engine.step()
    assert len(small.engine.requests) == 1
    small.engine.step(400)
    found = await witness.until_finished("witness")
    assert "".join(e.delta.text for e in found["witness"]) == text_of(400)


GOOD: list[dict[str, Any]] = [
    {},
    {"text": " "},
    {"text": "\x00\x01\x7f"},
    {"text": "e" + "\u0301" * 200},
    ids(*[0] * (CONTEXT - 1)),
    ids(0, VOCAB - 1),  # the last one is in the padding of the vocabulary
    {"sampling": S(temperature=0)},
    {"sampling": S(temperature=-0.0)},
    {"sampling": S(temperature=5e-324)},
    {"sampling": S(temperature=1e308)},
    {"sampling": S(top_p=5e-324, min_p=0, top_k=0)},
    {"sampling": S(top_p=1, min_p=1, top_k=2**31 - 1, seed=2**64 - 1)},
    {"sampling": S(min_p=-0.0)},
    {"stopping": T(max_tokens=CONTEXT - 2)},
    {"stopping": T(stop=["\x00", "\U0001f600" * 32], stop_token_ids=[0, VOCAB - 1])},
    {"stopping": T(max_tokens=0), "prefill_only": True},
    {**ids(*[0] * CONTEXT), "prefill_only": True},
    {"speculation": P(max_draft_tokens=0)},
    {"speculation": P(max_draft_tokens=2**31 - 1, sources=["ngram"])},
    {"speculation": P(off=True)},
    {"priority": pb.PRIORITY_BATCH, "timeout": Duration(nanos=1_000_000)},
    chat(USER),
    chat(pb.ChatMessage(role="system", content="")),
    {"timeout": Duration(seconds=LONGEST_S)},
    {"timeout": Duration(seconds=LONGEST_S - 1, nanos=999_999_999)},
    {"timeout": Duration(nanos=1)},
    {"output": O(logprobs=0)},
    {"output": O(logprobs=20, processed_logprobs=True)},
    {"cache_salt": "\U0001f9c2" * 256},
]


async def test_what_is_allowed_is_accepted(small: Harness) -> None:
    session = await small.session()
    for row, fields in enumerate(GOOD):
        await session.send(generation_id=str(row), start=build(fields))
        await session.event("accepted")
    requests = small.engine.requests
    assert requests[6].sampling.temperature == 0
    assert requests[7].sampling.temperature == 0
    assert math.copysign(1, requests[7].sampling.temperature) == 1
    assert requests[8].sampling.temperature == 0  # too small to tell from greedy
    assert requests[18].speculation.max_draft_tokens == 6  # the server's setting caps it
    assert requests[19].speculation.max_draft_tokens == 0
    assert (requests[-3].output.logprobs, requests[-2].output.logprobs) == (0, 20)
    assert requests[-1].cache_salt == "\U0001f9c2" * 256


async def test_unset_fields_mean_the_documented_defaults(small: Harness) -> None:
    session = await small.session()
    empty = pb.GenerationParams(text="hi", sampling=S(), stopping=T(), speculation=P())
    for name, params in {"unset": pb.GenerationParams(text="hi"), "empty": empty}.items():
        await session.send(generation_id=name, start=params)
        await session.event("accepted")
    for request in small.engine.requests:
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
            1,
            0,
            1,
            0,
        )
        assert request.stopping.max_tokens == 256
        assert request.stopping.eos_ids == {258}
        assert request.stopping.strings == ()
        assert request.speculation.max_draft_tokens is None
        assert not request.speculation.sources
        assert request.priority == 1
        assert request.cache_salt == ""
        assert request.output == OutputParams()
        assert request.deadline is None


@pytest.mark.parametrize(
    ("prompt", "expected"), [(255, 256), (256, 256), (257, 255), (500, 12), (511, 1)]
)
async def test_max_tokens_defaults_to_what_the_context_leaves(
    small: Harness, prompt: int, expected: int
) -> None:
    session = await small.session()
    await session.send(generation_id="a", start=build(ids(*[0] * prompt)))
    await session.event("accepted")
    assert small.engine.requests[0].stopping.max_tokens == expected


@pytest.mark.parametrize("ignore", [False, True])
async def test_ignore_eos(small: Harness, ignore: bool) -> None:
    session = await small.session()
    await session.send(generation_id="a", start=build({"stopping": T(ignore_eos=ignore)}))
    await session.event("accepted")
    assert small.engine.requests[0].stopping.eos_ids == (set() if ignore else {258})


@pytest.mark.parametrize("prompt", [144, 145, 158, 159, 160, 161, 200])
async def test_what_can_never_fit_the_pool_is_refused_by_name(model_dir: Path, prompt: int) -> None:
    """10 blocks of 16: prompt plus output may take 160 tokens."""
    async with running(model_dir, info={"num_blocks": 10}) as served:
        session = await served.session()
        await session.send(generation_id="a", start=build(ids(*[1] * prompt)))
        event = await session.event()
        if prompt < 160:
            assert event.WhichOneof("event") == "accepted"
            assert served.engine.requests[0].stopping.max_tokens == 160 - prompt
        else:
            assert "KV capacity of 160 tokens" in event.rejected.message
            assert fields_of(event.rejected) == ["start.token_ids.ids"]
        await session.start("ten", text="x" * 10, max_tokens=2)
        await session.event("accepted")
        await session.send(
            generation_id="b", start=build({**ids(1), "stopping": T(max_tokens=160)})
        )
        refused = (await session.event("rejected")).rejected
        assert fields_of(refused) == ["start.stopping.max_tokens"]
        assert "KV capacity of 160 tokens" in refused.message


async def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    from tests.service.harness import write_model

    async with running(write_model(tmp_path / "plain", chat=False)) as served:
        session = await served.session()
        await session.send(generation_id="a", start=build(chat(USER)))
        assert fields_of((await session.event("rejected")).rejected) == ["start.messages"]


async def test_many_violations_still_fit_the_trailers(model_dir: Path) -> None:
    """A status that is too big would reach the client as something else."""
    async with running(model_dir, max_stop_strings=1000) as served:
        params = build({"stopping": T(stop=["x" * 300] * 1000), "sampling": S(temperature=-1)})
        params.speculation.sources.extend(["\u00e9" * 500] * 32)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.generations.Complete(pb.CompleteRequest(params=params))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(fields_of(rich(caught.value))) == 16
        assert "(and 1032 more)" in rich(caught.value).message


async def test_messages_over_the_limit_are_one_violation_and_never_looked_at(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500,000 messages without a role fit a request of 1 MiB; going through them takes seconds."""

    async def encode_chat(*_: Any) -> tuple[int, ...]:
        raise AssertionError("must not be called")

    monkeypatch.setattr(TextCodec, "encode_chat", encode_chat)
    many = pb.ChatMessages.FromString(b"\x0a\x00" * 500_000)
    params = pb.GenerationParams(messages=many)
    for call, root in (
        (served.models.Tokenize(pb.TokenizeRequest(messages=many)), ""),
        (served.generations.Complete(pb.CompleteRequest(params=params)), "params."),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_of(rich(caught.value)) == [f"{root}messages.messages"]
        assert "limit of 4096" in rich(caught.value).message


class Untouchable:
    """Has a length; whoever goes through it fails."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


@pytest.mark.parametrize("count", [MAX_MESSAGES + 1, 1 << 21])
def test_the_number_of_messages_is_checked_before_any_message(count: int) -> None:
    found = Violations("")
    limits = Limits(max_stop_strings=1, max_stop_length=1, max_prompt_bytes=1)
    messages: Any = SimpleNamespace(messages=Untouchable(count))
    assert check_messages(messages, limits, True, found).messages == ()
    assert [field for field, _ in found.found] == ["messages.messages"]


def test_violations_are_capped_as_they_are_found() -> None:
    found = Violations("root")
    for n in range(100_000):
        found.need(False, f"f[{n}]", "bad")
    assert [field for field, _ in found.found] == [f"root.f[{n}]" for n in range(MAX_VIOLATIONS)]
    with pytest.raises(Refused, match=r"root.f\[0\]: bad \(and 99999 more\)"):
        found.refuse_if_any()


async def test_as_many_messages_as_allowed_are_taken(model_dir: Path) -> None:
    info = {"context_limit": 1 << 18, "num_blocks": 1 << 15}
    async with running(model_dir, info=info) as served:
        messages = pb.ChatMessages(messages=[USER] * MAX_MESSAGES)
        answer = await served.models.Tokenize(pb.TokenizeRequest(messages=messages))
        session = await served.session()
        await session.send(generation_id="a", start=pb.GenerationParams(messages=messages))
        await session.event("accepted")
        assert served.engine.requests[0].prompt == tuple(answer.token_ids)


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_bytes_that_do_not_parse(served: Harness, method: str) -> None:
    """Invalid UTF-8 in a string field is the caller's mistake, not INTERNAL."""
    good = pb.GenerateRequest(params=pb.GenerationParams(text="abc")).SerializeToString()
    make = served.channel.unary_stream if method == "Generate" else served.channel.unary_unary
    for bad in (
        good.replace(b"abc", b"a\xffc"),
        good.replace(b"abc", b"\xed\xa0\x80"),
        b"\x07\xff",
    ):
        call = make(f"/draftwire.v1.GenerationService/{method}")(bad)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if hasattr(call, "__await__") else call.read())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Traceback" not in str(rich(caught.value))
    call = make(f"/draftwire.v1.GenerationService/{method}")(good)
    await served.engine.submitted()
    call.cancel()


floats = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1.0, 0.5, -0.0, NAN, INF, 5e-324]))
ints = st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1), st.integers(-2, 600))
strings = st.text(max_size=40)
token_ids = st.lists(
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, VOCAB)), max_size=20
)


def given_only(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


@st.composite
def params_strategy(draw: st.DrawFn) -> pb.GenerationParams:
    prompt = draw(
        st.one_of(
            strings.map(lambda t: {"text": t}),
            token_ids.map(lambda v: {"token_ids": pb.TokenIds(ids=v)}),
            st.lists(
                st.tuples(st.sampled_from(["user", "system", "", "x"]), strings), max_size=4
            ).map(
                lambda turns: {
                    "messages": pb.ChatMessages(
                        messages=[pb.ChatMessage(role=r, content=c) for r, c in turns]
                    )
                }
            ),
            st.just({}),
        )
    )
    fields: dict[str, Any] = dict(prompt)
    if draw(st.booleans()):
        fields["sampling"] = S(
            **given_only(
                temperature=draw(floats),
                top_p=draw(floats),
                min_p=draw(floats),
                top_k=draw(ints),
                seed=draw(st.one_of(st.none(), st.integers(0, 2**64 - 1))),
            )
        )
    if draw(st.booleans()):
        fields["stopping"] = T(
            stop=draw(st.lists(strings, max_size=6)),
            stop_token_ids=draw(token_ids),
            ignore_eos=draw(st.booleans()),
            **given_only(max_tokens=draw(ints)),
        )
    if draw(st.booleans()):
        fields["speculation"] = P(
            off=draw(st.booleans()),
            sources=draw(st.lists(st.sampled_from(["ngram", "model", ""]), max_size=3)),
            **given_only(max_draft_tokens=draw(ints)),
        )
    fields["priority"] = draw(st.integers(-3, 9))
    fields["prefill_only"] = draw(st.booleans())
    if draw(st.booleans()):
        fields["timeout"] = Duration(
            seconds=draw(st.integers(-(2**63), 2**63 - 1)),
            nanos=draw(st.integers(-(2**31), 2**31 - 1)),
        )
    return pb.GenerationParams(**fields)


def test_no_request_whatsoever_is_internal(model_dir: Path) -> None:
    """Any params are accepted, or refused with INVALID_ARGUMENT and at least one field."""
    loop = asyncio.new_event_loop()
    context = running(model_dir, info={"context_limit": CONTEXT})
    harness = loop.run_until_complete(context.__aenter__())

    async def check(params: pb.GenerationParams) -> None:
        session = await harness.session()
        await session.send(generation_id="a", start=params)
        event = await session.event()
        if event.WhichOneof("event") == "rejected":
            assert event.rejected.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], event
            assert fields_of(event.rejected)
        else:
            request = harness.engine.requests[-1]
            sampling = request.sampling
            assert sampling.temperature >= 0 < sampling.top_p <= 1 >= sampling.min_p >= 0
            assert 0 < len(request.prompt) <= CONTEXT - request.stopping.max_tokens
            assert all(0 <= token < VOCAB for token in request.prompt)
        session.call.cancel()

    @settings(
        max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(params_strategy())
    def fuzz(params: pb.GenerationParams) -> None:
        loop.run_until_complete(asyncio.wait_for(check(params), TIMEOUT_S))

    try:
        fuzz()
        loop.run_until_complete(harness.serving())
    finally:
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.close()
