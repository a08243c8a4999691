"""Checks that the requests of several services share, and what collects their violations."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.types import ModelInfo
from service.pb import draftwire_pb2 as pb
from service.status import MAX_VIOLATIONS, Violation, invalid

# What one request may make the event loop look at, element by element; both are far beyond use.
MAX_MESSAGES = 4096
MAX_DETOKENIZE_IDS = 131072


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: (role, content) of each turn."""

    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one request, from the settings."""

    max_stop_strings: int
    max_stop_length: int
    max_prompt_bytes: int


class Violations:
    """What is wrong with a request, field by field. `root` is the path of the checked message.

    All violations are counted, and as many kept in `found` as a status carries.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._count = 0
        self.found: list[Violation] = []

    def need(self, ok: bool, field: str, description: str) -> bool:
        """Note a violation unless `ok`; returns `ok`."""
        if not ok:
            self._count += 1
            if len(self.found) < MAX_VIOLATIONS:
                path = ".".join(part for part in (self._root, field) if part)
                self.found.append((path, description))
        return ok

    def refuse_if_any(self) -> None:
        if self.found:
            raise invalid(self.found, self._count)


def check_text(text: str, field: str, limits: Limits, found: Violations) -> None:
    """A plain prompt: not empty, not too long."""
    size = len(text.encode())
    found.need(size > 0, field, "must not be empty")
    found.need(
        size <= limits.max_prompt_bytes,
        field,
        f"{size} bytes are over the limit of {limits.max_prompt_bytes}",
    )


def check_ids(ids: Seq[int], field: str, info: ModelInfo, found: Violations) -> None:
    """Token ids in [0, vocab_size); the first offender is named by index and value."""
    if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
        index, value = next((i, v) for i, v in enumerate(ids) if not 0 <= v < info.vocab_size)
        found.need(
            False, f"{field}[{index}]", f"{value} is not in [0, {info.vocab_size}), the vocabulary"
        )


def check_messages(
    messages: pb.ChatMessages, limits: Limits, chat: bool, found: Violations
) -> Chat:
    """A conversation: 1 to MAX_MESSAGES messages, each with a role, and a template to render it."""
    found.need(chat, "messages", "the model has no chat template")
    count = len(messages.messages)
    found.need(count > 0, "messages.messages", "must not be empty")
    if not found.need(
        count <= MAX_MESSAGES,
        "messages.messages",
        f"{count} messages are over the limit of {MAX_MESSAGES}",
    ):
        return Chat(())
    size = messages.ByteSize()
    if not found.need(
        size <= limits.max_prompt_bytes,
        "messages",
        f"{size} bytes are over the limit of {limits.max_prompt_bytes}",
    ):
        return Chat(())
    for index, message in enumerate(messages.messages):
        found.need(bool(message.role), f"messages.messages[{index}].role", "must not be empty")
    return Chat(tuple((m.role, m.content) for m in messages.messages))
