"""The form of a record: every field survives, and what is wrong with a line is said."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import hypothesis
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from service.pb import draftwire_pb2 as pb
from service.recorded import RecordedSample, from_line, to_line
from tests.service.harness import params_of
from tests.service.recordings import plain_sample, recorded

numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ids = st.lists(st.integers(0, 2**31), max_size=4)
uint64 = st.integers(0, 2**64 - 1)
samplings = st.builds(
    pb.Sampling,
    temperature=st.none() | numbers,
    top_k=st.none() | st.integers(-(2**31), 2**31 - 1),
    top_p=st.none() | numbers,
    seed=st.none() | uint64,
    logit_bias=st.dictionaries(st.integers(-(2**63), 2**63 - 1), numbers, max_size=3),
    allowed_token_ids=st.none() | st.builds(pb.TokenIds, ids=ids),
    banned_token_ids=ids,
    bad_words=st.lists(texts, max_size=2),
)
stoppings = st.builds(
    pb.Stopping,
    max_tokens=st.none() | st.integers(0, 2**31 - 1),
    stop_token_ids=ids,
    stop=st.lists(texts, max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 9),
)
nanos = st.integers(0, 999_999_999)
prompts = st.one_of(
    st.builds(lambda text: {"text": text}, texts),
    st.builds(lambda ids: {"token_ids": pb.TokenIds(ids=ids)}, ids),
    st.builds(
        lambda pairs: {
            "messages": pb.ChatMessages(
                messages=[pb.ChatMessage(role=r, content=c) for r, c in pairs]
            )
        },
        st.lists(st.tuples(texts, texts), max_size=2),
    ),
)
rest = st.fixed_dictionaries(
    {
        "sampling": st.none() | samplings,
        "stopping": st.none() | stoppings,
        "speculation": st.none()
        | st.builds(pb.Speculation, off=st.booleans(), sources=st.lists(texts, max_size=2)),
        "priority": st.sampled_from([0, 1, 2, 3]),
        "timeout": st.none() | st.builds(Duration, seconds=st.integers(0, 10**11), nanos=nanos),
        "cache_salt": texts,
        "forced_text": texts,
        "output": st.none() | st.builds(pb.Output, logprobs=st.none() | st.integers(0, 20)),
        "grammar": st.none() | st.builds(pb.Grammar, regex=texts),
    }
)
requests = st.builds(lambda prompt, rest: pb.GenerationParams(**prompt, **rest), prompts, rest)
samples = st.builds(
    RecordedSample,
    index=st.just(0),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    text=texts,
    finish_reason=st.sampled_from(["STOP", "ERROR"]),
    matched=st.none() | texts | st.integers(0, 2**32 - 1),
    usage=st.builds(pb.Usage, prompt_tokens=st.integers(0, 2**32 - 1)),
    speculation=st.builds(
        pb.SpeculationStats,
        by_source=st.dictionaries(texts, st.builds(pb.SourceStats, drafted=st.just(3)), max_size=2),
    ),
)


@hypothesis.settings(deadline=None)
@given(requests, samples)
def test_every_field_survives(params: pb.GenerationParams, sample: RecordedSample) -> None:
    written = recorded(params, sample)
    line = to_line(written)
    assert line.count(b"\n") == 1
    read = from_line(line)
    assert read == written
    # Equality of messages takes -0.0 for 0.0; their bytes do not.
    assert read.params.SerializeToString(deterministic=True) == params.SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version 2"),
        ({"version": True}, "version"),
        ({"strict": 1}, "strict"),
        ({"tenant": None}, "tenant"),
        ({"text": "x"}, ""),
        ({"params": {"tempreature": 1}}, "params"),
        ({"params": {"sampling": {"seed": str(2**64)}}}, "params"),
        ({"params": {"text": "x", "n": 2}}, "samples"),
        ({"prompt_token_ids": [1, "2"]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"samples": []}, "samples"),
        ({"samples": ["x"]}, "object"),
        ({"generation": "\ud800"}, "surrogates"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(change: dict[str, Any], named: str) -> None:
    data = json.loads(to_line(recorded(params_of(), plain_sample()))) | change
    if not named:
        from_line(json.dumps(data).encode())  # more than is known does no harm at the top
        return
    with pytest.raises(ValueError, match=named):
        from_line(json.dumps(data).encode())


@pytest.mark.parametrize("line", [b"", b"{", b"[]\n", b"\xff\n", b"1\n", b"[" * 100_000])
def test_what_is_no_record_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        from_line(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
PARTS = ["text", "sampling", "seed", "logit_bias", "timeout", "messages", "n", "priority"]


@hypothesis.settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_other_error_whatever_is_in_a_line(data: st.DataObject) -> None:
    line = json.loads(to_line(recorded(params_of(n=1), plain_sample())))
    where = data.draw(st.sampled_from([line, line["params"], line["samples"][0]]))
    where[data.draw(st.sampled_from([*where, *PARTS]))] = data.draw(json_values)
    where["sampling"] = {data.draw(st.sampled_from(PARTS)): data.draw(json_values)}
    with contextlib.suppress(ValueError):
        from_line(json.dumps(line).encode())
