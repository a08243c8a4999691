"""Text to token ids and back, off the event loop where it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from engine.errors import ModelError
from engine.request import ForcedText
from service.chat import ChatTemplate, load_chat_template

# Tokenizing runs at about a megabyte a second: what is shorter takes less than a thread hand-over
# and a millisecond.
INLINE_CHARS = 1024
# Rendering a turn takes about as long as tokenizing so much text, however short the turn is.
TURN_CHARS = 16

T = TypeVar("T")


class TextCodec:
    """The tokenizer and chat template of one model. `executor` runs what is long."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, executor: Executor
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._executor = executor

    @property
    def chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    async def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a plain prompt, with the special tokens that the tokenizer adds."""
        return await self._run(len(text), lambda: self._encode(text, special=True))

    async def encode_forced(self, text: str) -> ForcedText:
        """A text that an output is to begin with: its tokens but for the last, and what is left."""
        return await self._run(len(text), lambda: self._forced(text))

    def _forced(self, text: str) -> ForcedText:
        # Other decoders than that over plain bytes treat the beginning of a text unlike the rest;
        # special tokens have no text of their own. Then the bytes alone say what fits.
        ids = self._encode(text, special=False)
        plain = isinstance(self._tokenizer.decoder, ByteLevel)
        if plain and self._decode(ids, skip_special_tokens=True) == text:
            for end in range(len(ids) - 1, 0, -1):
                begun = self._decode(ids[:end], skip_special_tokens=True)
                if text.startswith(begun):
                    return ForcedText(ids[:end], text[len(begun) :].encode(), len(text))
        return ForcedText((), text.encode(), len(text))

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of each word as it is, and after a space; each once, without special tokens."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]

        def work() -> tuple[tuple[int, ...], ...]:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return tuple(dict.fromkeys(tuple(e.ids) for e in encodings if e.ids))

        return await self._run(sum(map(len, texts)), work)

    async def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Ids of a conversation up to the assistant's next turn. Raises ChatError."""
        template = self._template
        if template is None:
            raise ValueError("the model has no chat template")
        size = sum(TURN_CHARS + len(role) + len(content) for role, content in messages)
        return await self._run(size, lambda: self._encode(template.render(messages), special=False))

    async def decode(self, ids: Sequence[int], keep_special_tokens: bool) -> str:
        """Text of ids, each of which must be in the vocabulary."""
        return await self._run(
            4 * len(ids),
            lambda: self._decode(ids, not keep_special_tokens),
        )

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        # As in `_encode`: only the batch form releases the interpreter lock.
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        # The batch form releases the interpreter lock; `encode` holds it to the end.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return tuple(encoding.ids)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def load_codec(directory: Path, executor: Executor) -> TextCodec:
    """Load tokenizer and chat template from a model's directory. Raises ModelError."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        template = load_chat_template(directory)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"tokenizer in {directory} cannot be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextCodec(tokenizer, template, executor)
