"""From token ids to text, as they come: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

UNFINISHED = "\ufffd"
# Bytes of an unfinished character, and so the U+FFFDs that may still become one.
MOST_HELD = 3
MOST_CONTEXT = 16


class StopStrings:
    """Finds stop strings wherever they fall and holds back what may become one.

    The result is that of adding one character at a time: the stop that completes first wins,
    the first in the list among those that complete together. It is left out unless `include`. In
    the first `skip` characters none begins.
    """

    def __init__(self, stops: Seq[str], include: bool = False, skip: int = 0) -> None:
        self._skip = skip
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._firsts = frozenset(s[0] for s in stops if s)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is certain by now, and the stop that `text` completed, if any."""
        if not self._stops:
            return text, None
        if self._skip:
            skipped, text = text[: self._skip], text[self._skip :]
            self._skip -= len(skipped)
            found, stop = self.push(text) if text else ("", None)
            return skipped + found, stop
        pending = self._held + text
        hits = [(pending.find(s) + len(s), i) for i, s in enumerate(self._stops) if s in pending]
        if hits:
            end, which = min(hits)
            stop = self._stops[which]
            self._held = ""
            return pending[: end if self._include else end - len(stop)], stop
        keep = self._open_tail(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _open_tail(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-n] in self._firsts and any(s.startswith(text[-n:]) for s in self._stops):
                return n
        return 0


class Detokenizer:
    """`TextStream` over a fast tokenizer. Joined pieces equal the decoding of all ids at once.

    Bytes of an unfinished character show as U+FFFD at the end of the text and are held until it is
    complete; if the output ends inside one, `flush` gives them so. What was given is never taken
    back: decoders with byte fallback turn a run of byte tokens into U+FFFD as a whole if it is not
    UTF-8, here only what follows the last whole character becomes U+FFFD.

    In the first `unwatched` tokens no stop string is looked for. `keep_special`: special tokens
    have a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Seq[int],
        stops: StopStrings,
        unwatched: int = 0,
        keep_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._unwatched = unwatched
        self._skip_special = not keep_special
        # A decoder over plain bytes needs no context; others treat the first id unlike the rest.
        self._plain = isinstance(tokenizer.decoder, ByteLevel)
        # Decoded again with each token: ids whose text was given, then those still open.
        self._settled = [] if self._plain else _context(self._decode_ids, prompt)
        self._open: list[int] = []
        self._given = self._decode()
        self._stops = stops
        self.length = 0

    def push(self, token: int) -> tuple[str, str | None]:
        piece = self._piece(token)
        self.length += len(piece)
        self._unwatched -= 1
        if not piece or self._unwatched > 0:
            return piece, None
        return self._stops.push(piece)

    def _piece(self, token: int) -> str:
        """Text that became final."""
        self._open.append(token)
        text = self._decode()
        if not text.startswith(self._given):
            self._settled, self._given = [], ""
            text = self._decode()
        held = min(len(text) - len(text.rstrip(UNFINISHED)), MOST_HELD)
        piece = text[len(self._given) : len(text) - held]
        self._given += piece
        if piece and not held:
            self._settled, self._open = [] if self._plain else self._open, []
            self._given = self._decode()
        elif self._given and not held:
            self._open = []  # a special token: no text, and so no use to what comes after it
        return piece

    def flush(self) -> str:
        tail, stop = self._stops.push(self._decode()[len(self._given) :])
        return tail if stop else tail + self._stops.flush()

    def _decode(self) -> str:
        return self._decode_ids(self._settled + self._open)

    def _decode_ids(self, ids: list[int]) -> str:
        return (
            str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)) if ids else ""
        )


def _context(decode: Callable[[list[int]], str], prompt: Seq[int]) -> list[int]:
    """The end of the prompt: so much that it has a text (a special token has none) and begins
    with a whole character. All of it where none has a text: it may be the blank that a decoder
    strips from the first id."""
    tail, text = list[int](), ""
    for n in range(1, min(len(prompt), MOST_CONTEXT) + 1):
        tail = list(prompt[-n:])
        text = decode(tail)
        if text and not text.startswith(UNFINISHED):
            return tail
    return [] if text else tail
