"""The model's chat template, rendered as `transformers` renders it, in a sandbox.

A template is code that comes with a model, so it runs in jinja2's immutable sandbox and sees only
strings. The environment has what published templates rely on: trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, and `{% generation %}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatError(Exception):
    """The template does not accept this conversation."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant turns for training: plain output."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations. `special` are the model's special tokens by name (`bos_token`...)."""

    def __init__(
        self, source: str, special: Mapping[str, str], now: Callable[[], datetime]
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._template = environment.from_string(source)
        self._special = dict(special)

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt that asks for the assistant's next turn. Raises ChatError."""
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except TemplateError as error:
            raise ChatError(f"the chat template refuses: {error.message or error}") from error
        except Exception as error:
            raise ChatError(f"the chat template fails with {type(error).__name__}") from error


def load_chat_template(
    directory: Path, now: Callable[[], datetime] = datetime.now
) -> ChatTemplate | None:
    """The template of the model in `directory`, or None if it has none.

    Raises jinja2.TemplateSyntaxError for a broken one.
    """
    config = read_json(directory / "tokenizer_config.json")
    source = _source(directory, config)
    if source is None:
        return None
    special = read_json(directory / "special_tokens_map.json") | config
    return ChatTemplate(source, _special_tokens(special), now)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = {t["name"]: t["template"] for t in source}.get("default")
    return source if isinstance(source, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`*_token` entries, written as a string or as an added token with its `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
