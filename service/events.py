"""Engine types to protobuf: what a stream says about a generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.outcome import Finish, FinishReason, Logprobs, SourceStats, TokenChunk
from service.pb import draftwire_pb2 as pb
from service.status import failure


def delta(chunk: TokenChunk, index: int) -> pb.Delta | None:
    """The output in a chunk of sample `index`; None if there is none."""
    if not (chunk.tokens or chunk.text or chunk.prompt_logprobs):
        return None
    return pb.Delta(
        text=chunk.text,
        token_ids=chunk.tokens,
        seq=chunk.offset + len(chunk.tokens),
        logprobs=token_logprobs(chunk.logprobs),
        prompt_logprobs=token_logprobs(chunk.prompt_logprobs),
        index=index,
        text_offsets=chunk.text_offsets,
    )


def token_logprobs(logprobs: Iterable[Logprobs]) -> Iterator[pb.TokenLogprobs]:
    """Those of each token."""
    for token, logprob, ids, values in logprobs:
        top = (
            pb.TokenLogprob(token_id=i, logprob=value) for i, value in zip(ids, values, strict=True)
        )
        yield pb.TokenLogprobs(token_id=token, logprob=logprob, top=top)


def finished(finish: Finish, index: int) -> pb.Finished:
    """The end of sample `index`; with its cause if the reason is ERROR."""
    message = pb.Finished(
        reason=f"FINISH_REASON_{finish.reason.value}",
        usage=pb.Usage(
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            cached_tokens=finish.cached_tokens,
        ),
        timings=_timings(finish),
        speculation=_speculation(finish),
        index=index,
    )
    if isinstance(finish.matched, str):
        message.stop = finish.matched
    elif finish.matched is not None:
        message.stop_token_id = finish.matched
    if finish.reason is FinishReason.ERROR:
        message.error.CopyFrom(failure(finish).status)
    return message


def session_events(chunk: TokenChunk, index: int) -> Iterator[pb.Event]:
    """The events that a chunk is on a session, where its request id is the client's."""
    if (output := delta(chunk, index)) is not None:
        yield pb.Event(generation_id=chunk.request_id, delta=output)
    if chunk.finish is not None:
        yield pb.Event(generation_id=chunk.request_id, finished=finished(chunk.finish, index))


def generate_responses(chunk: TokenChunk, index: int) -> Iterator[pb.GenerateResponse]:
    """The messages that a chunk is on Generate."""
    if (output := delta(chunk, index)) is not None:
        yield pb.GenerateResponse(delta=output)
    if chunk.finish is not None:
        yield pb.GenerateResponse(finished=finished(chunk.finish, index))


def _timings(finish: Finish) -> pb.Timings:
    started = finish.finished if finish.scheduled is None else finish.scheduled
    timings = pb.Timings(queue_s=started - finish.arrived, total_s=finish.finished - finish.arrived)
    if finish.first_token is not None:
        timings.ttft_s = finish.first_token - finish.arrived
    return timings


def _speculation(finish: Finish) -> pb.SpeculationStats:
    def stats(counts: SourceStats) -> pb.SourceStats:
        return pb.SourceStats(
            drafted=counts.drafted,
            accepted=counts.accepted,
            drafted_at=counts.drafted_at,
            accepted_at=counts.accepted_at,
        )

    return pb.SpeculationStats(
        drafted=finish.drafts.drafted,
        accepted=finish.drafts.accepted,
        target_steps=finish.target_steps,
        by_source={source: stats(counts) for source, counts in finish.by_source},
    )
