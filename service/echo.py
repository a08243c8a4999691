"""The prompt for who asks to have it delivered, too. The engine has no part in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from service.pb import draftwire_pb2 as pb

# Characters and token ids in a delta: at most 0.6 MiB, where clients accept messages of 4 MiB.
PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Echo:
    """What is delivered of a prompt; nothing if it was not asked for."""

    text: str = ""
    token_ids: tuple[int, ...] = ()

    def deltas(self) -> Iterator[pb.Delta]:
        """All of it, in pieces that fit into messages."""
        for start in range(0, max(len(self.text), len(self.token_ids)), PIECE):
            end = start + PIECE
            yield pb.Delta(
                prompt_text=self.text[start:end], prompt_token_ids=self.token_ids[start:end]
            )
