"""Tokenizing and chat templates: equal to the reference, and off the event loop."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from engine.errors import ModelError
from service.chat import ChatError, ChatTemplate, load_chat_template
from service.pb import draftwire_pb2 as pb
from service.tokenize import INLINE_CHARS, TextCodec, load_codec
from tests.service.harness import BOS, IM_END, Harness, params_of, running, write_model

CHATS = [
    [("user", "hi")],
    [("system", "Be brief."), ("user", "hé <b> & 'x'\n"), ("assistant", "ok"), ("user", "{{ 1 }}")],
    [("user", ""), ("assistant", " "), ("user", "日本語 \U0001f469\u200d\U0001f467")],
]

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
BLOCKS = """{{ bos_token }}
{%- if tools is not none %}
    TOOLS
{%- endif %}
{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else 'none' %}
{%- for message in messages %}
    {% if message['role'] == 'system' %}
        {% continue %}
    {% endif %}
    [{{ message['role'] | upper }}] {{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}"""
JSON = """{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}
{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}"""
NAMESPACE = """{% set ns = namespace(count=0) %}{% for m in messages %}
{% set ns.count = ns.count + m.content | length %}{% endfor %}{{ ns.count }}{{ messages[-1].role }}
{%- for m in messages[1:] %} {{ loop.index0 }}:{{ m['content'].split('\\n')[0] }}{% endfor %}"""


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def with_template(directory: Path, template: str) -> Path:
    write_model(directory, chat=False)
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize("template", [SMOLLM2, BLOCKS, JSON, NAMESPACE])
def test_templates_render_as_in_transformers(template: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    directory = with_template(tmp_path / "model", template)
    reference = PreTrainedTokenizerFast.from_pretrained(str(directory))
    assert (reference.bos_token, reference.eos_token) == (BOS, IM_END)
    ours = load_chat_template(directory)
    assert ours is not None
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        expected = reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert ours.render(chat) == expected


async def test_ids_are_those_of_transformers(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    from transformers import PreTrainedTokenizerFast

    directory = with_template(tmp_path / "model", SMOLLM2)
    reference = PreTrainedTokenizerFast.from_pretrained(str(directory))
    codec = load_codec(directory, executor)
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        encoded = reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        assert await codec.encode_chat(chat) == tuple(encoded["input_ids"])
    for text in ("a", " a  \t\n", "\x00", f"x{IM_END}y", "z" * (INLINE_CHARS + 1)):
        ids = await codec.encode(text)
        assert ids == tuple(reference(text)["input_ids"])
        assert await codec.decode(ids, keep_special_tokens=True) == text


@pytest.mark.model
@pytest.mark.skipif("DRAFTWIRE_TEST_MODEL" not in os.environ, reason="names a model directory")
async def test_a_real_model_agrees_with_transformers(executor: ThreadPoolExecutor) -> None:
    from transformers import AutoTokenizer

    directory = Path(os.environ["DRAFTWIRE_TEST_MODEL"])
    reference = AutoTokenizer.from_pretrained(str(directory))
    codec = load_codec(directory, executor)
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        encoded = reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        assert await codec.encode_chat(chat) == tuple(encoded["input_ids"])
    for text in ("def f(x):\n    return", "  two", "日本語", "a" * 5000):
        assert await codec.encode(text) == tuple(reference(text)["input_ids"])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no thanks') }}",
        "{{ messages[0].missing.attribute }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_refuses_or_fails_is_an_error_of_the_conversation(template: str) -> None:
    chat = ChatTemplate(template, {}, datetime.now)
    with pytest.raises(ChatError):
        chat.render([("user", "hi")])


def test_the_date_is_the_injected_one() -> None:
    chat = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, lambda: datetime(2031, 5, 6))
    assert chat.render([]) == "2031-05-06"


def test_where_templates_and_special_tokens_are_found(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "bos_token": {"content": "<B>"},
        "eos_token": "<E>",
        "pad_token": None,
        "chat_template": [
            {"name": "tools", "template": "T"},
            {"name": "default", "template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<U>", "eos_token": "old"}')
    listed = load_chat_template(tmp_path)
    assert listed is not None
    assert listed.render([]) == "<B><E><U>"
    (tmp_path / "chat_template.jinja").write_text("file")
    from_file = load_chat_template(tmp_path)
    assert from_file is not None
    assert from_file.render([]) == "file"
    assert load_chat_template(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("chat_template.jinja", "{% for %}"),
        ("tokenizer_config.json", "{"),
    ],
)
def test_a_broken_model_directory_is_named(
    tmp_path: Path, executor: ThreadPoolExecutor, name: str, content: str | None
) -> None:
    directory = write_model(tmp_path / "model")
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    with pytest.raises(ModelError, match=str(directory)):
        load_codec(directory, executor)


async def test_long_texts_are_tokenized_off_the_loop(model_dir: Path) -> None:
    """Eight prompts of 900 kB at once; health answers and a running stream goes on meanwhile."""
    info = {"context_limit": 1 << 22, "num_blocks": 1 << 20}
    async with running(model_dir, info=info, max_waiting_tokens=1 << 30) as served:
        session = await served.session()
        await session.start("running", max_tokens=4000)
        await served.engine.submitted()
        calls = [
            served.generations.Generate(pb.GenerateRequest(params=params_of("x y " * 225_000)))
            for _ in range(8)
        ]
        checks = 0
        while len(served.engine.requests) < 9:
            await served.health.Check(health_pb2.HealthCheckRequest())
            served.engine.step()
            checks += 1
        assert checks > 30
        assert {len(r.prompt) for r in served.engine.requests[1:]} == {900_000}
        for call in calls:
            call.cancel()


async def test_a_prompt_over_the_byte_limit_is_refused_before_tokenizing(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode(self: TextCodec, text: str) -> tuple[int, ...]:
        raise AssertionError("must not be called")

    monkeypatch.setattr(TextCodec, "encode", encode)
    text = "x" * ((1 << 20) + 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.generations.Complete(pb.CompleteRequest(params=params_of(text)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.models.Tokenize(pb.TokenizeRequest(text=text))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
