"""From token ids to text, as they come: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class StopStrings:
    """Finds stop strings wherever they fall and holds back what may become one.

    The result is that of adding one character at a time: the stop that completes first wins,
    the first in the list among those that complete together.
    """

    def __init__(self, stops: Seq[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is certain by now, and the stop that `text` completed, if any."""
        if not self._stops:
            return text, None
        pending = self._held + text
        hits = [(pending.find(s) + len(s), i) for i, s in enumerate(self._stops) if s in pending]
        if hits:
            end, which = min(hits)
            stop = self._stops[which]
            self._held = ""
            return pending[: end - len(stop)], stop
        keep = self._open_tail(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _open_tail(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stops):
                return n
        return 0


class Detokenizer:
    """`TextStream` over a fast tokenizer. Joined pieces equal the decoding of all ids at once.

    Bytes of an unfinished character are held until they are complete; if the output ends inside
    one, `flush` gives what the tokenizer makes of it (U+FFFD).
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Seq[int], stops: Seq[str]) -> None:
        self._tokenizer = tokenizer
        # Decoders that strip a leading space must see what stands before the output.
        self._context = list(prompt[-1:]) if strips_leading_space(tokenizer) else []
        self._stream = DecodeStream(skip_special_tokens=True)
        self._done = 0
        for token in self._context:
            self._done += len(self._stream.step(tokenizer, token) or "")
        self._ids: list[int] = []
        self._stops = StopStrings(stops)

    def push(self, token: int) -> tuple[str, str | None]:
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer, token) or ""
        self._done += len(piece)
        return self._stops.push(piece) if piece else ("", None)

    def flush(self) -> str:
        text = self._tokenizer.decode(self._context + self._ids, skip_special_tokens=True)
        tail, stop = self._stops.push(text[self._done :])
        return tail if stop else tail + self._stops.flush()


def strips_leading_space(tokenizer: Tokenizer) -> bool:
    """Whether the decoder treats the first token of a text unlike the others."""
    return type(tokenizer.decoder).__name__ not in ("ByteLevel", "NoneType")
