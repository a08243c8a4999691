"""A submitted generation: its samples, each a request of the engine's, from start to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.outcome import FinishReason, TokenChunk
from engine.request import Request
from service.admission import Ticket
from service.echo import Echo
from service.pb import draftwire_pb2 as pb
from service.record import Record
from service.recording import Recording
from service.router import Mailbox

SEEDS = 1 << 64


def samples_of(request: Request, count: int) -> tuple[Request, ...]:
    """The engine's requests for `count` samples. The first tells the prompt's logprobs."""
    if count == 1:
        return (request,)
    first = replace(request, group=request.id)
    output = replace(request.output, prompt_logprobs=None)
    seed = request.sampling.seed
    others = (
        replace(
            first,
            id=f"{request.id}.{i:02}",
            sampling=replace(request.sampling, seed=(seed + i) % SEEDS),
            output=output,
        )
        for i in range(1, count)
    )
    return first, *others


class Sample:
    """Takes chunks from the router until the last one. `mailbox` None: nobody reads them."""

    def __init__(
        self,
        request: Request,
        mailbox: Mailbox,
        ticket: Ticket,
        record: Record,
        recording: Recording,
    ) -> None:
        self.request = request
        self.mailbox: Mailbox | None = mailbox
        self.ticket = ticket
        self.record = record
        self.ended = False
        self._recording = recording
        self._index = mailbox.index

    def deliver(self, chunk: TokenChunk) -> None:
        """See `service.router.Receiver`."""
        self.ticket.leave()
        if (finish := chunk.finish) is not None:
            self.ended = True
            if self._index:  # all of them have one prompt, which counts once
                finish = replace(finish, prompt_tokens=0, cached_tokens=0)
                chunk = replace(chunk, finish=finish)
            self.record.finished(finish)
        self._recording.chunk(self._index, chunk)
        if self.mailbox is not None:
            self.mailbox.put(chunk)


class Generation:
    """`samples` in order, at least one. `echo` is to be delivered before anything of them.

    `close` is the reader's goodbye: it cancels in the engine what has not ended; the end is still
    awaited and recorded, so usage is exact.
    """

    def __init__(
        self, samples: Sequence[Sample], cancel: Callable[[str, FinishReason], None], echo: Echo
    ) -> None:
        self.echo = echo
        self._samples = tuple(samples)
        self._cancel = cancel

    @property
    def size(self) -> int:
        """So many ends will come."""
        return len(self._samples)

    def accepted(self) -> pb.Accepted:
        first = self._samples[0]
        return pb.Accepted(
            seed=self.seed(0),
            prompt_tokens=len(first.request.prompt),
            queue_position=first.ticket.position,
        )

    def seed(self, index: int) -> int:
        """That of a sample."""
        return self._samples[index].request.sampling.seed

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End it early; the last chunks say so, but for what has ended by itself."""
        for sample in self._samples:
            if not sample.ended:
                self._cancel(sample.request.id, reason)

    def close(self) -> None:
        for sample in self._samples:
            sample.mailbox = None
        self.cancel()
