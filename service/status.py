"""Refusals and failures as google.rpc.Status: one table from what went wrong to code and details.

Every status carries ErrorInfo with domain "draftwire" and one of the reasons below, so that a
client need not read messages. A request's content never appears in a status beyond short values.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from engine.outcome import Finish, FinishReason
from engine.verify import ERRORS, RULED_OUT

DOMAIN = "draftwire"
# Trailing metadata is limited to 8 KiB by most peers: so much fits, base64 included.
MAX_VIOLATIONS = 16
MAX_FIELD = 80
MAX_TEXT = 160
ENGINE_RETRY_S = 1.0


class Reason(StrEnum):
    """ErrorInfo.reason."""

    INVALID_REQUEST = "INVALID_REQUEST"
    DUPLICATE_GENERATION_ID = "DUPLICATE_GENERATION_ID"
    UNKNOWN_GENERATION_ID = "UNKNOWN_GENERATION_ID"
    QUEUE_FULL = "QUEUE_FULL"
    SESSION_FULL = "SESSION_FULL"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"
    NOT_READY = "NOT_READY"
    DRAINING = "DRAINING"
    ENGINE_LOST = "ENGINE_LOST"
    GENERATION_FAILED = "GENERATION_FAILED"
    DEADLINE = "DEADLINE"
    INTERRUPTED = "INTERRUPTED"
    INTERNAL = "INTERNAL"


CODES: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.DUPLICATE_GENERATION_ID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_GENERATION_ID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.SESSION_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_STREAMS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.ENGINE_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.GENERATION_FAILED: grpc.StatusCode.INTERNAL,
    Reason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.INTERRUPTED: grpc.StatusCode.UNAVAILABLE,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}

Violation = tuple[str, str]  # field path, description


class Refused(Exception):
    """A request that is not served, with the status that says why."""

    def __init__(self, reason: Reason, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.reason = reason
        self.status = status

    @property
    def code(self) -> grpc.StatusCode:
        return CODES[self.reason]


def refused(
    reason: Reason,
    message: str,
    *,
    violations: Iterable[Violation] = (),
    retry_after_s: float | None = None,
    quota: str = "",
) -> Refused:
    """A refusal with the details that apply: BadRequest, RetryInfo, QuotaFailure (`quota` names
    the setting that is the limit)."""
    code, _ = CODES[reason].value
    # What came with half a surrogate pair in it must not come in the way of saying so.
    message = message.encode("utf-8", "replace").decode()
    status = status_pb2.Status(code=code, message=message[: 2 * MAX_TEXT])
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason.value, domain=DOMAIN))
    if bad := _bad_request(list(violations)):
        status.details.add().Pack(bad)
    if retry_after_s is not None:
        delay = Duration(nanos=0)
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if quota:
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=quota, description=message[:MAX_TEXT])
        status.details.add().Pack(failure)
    return Refused(reason, status)


def invalid(violations: list[Violation], count: int | None = None) -> Refused:
    """INVALID_ARGUMENT for everything that is wrong with a request.

    `count` is how many violations there were, if not all of them are given.
    """
    field, description = violations[0]
    others = (len(violations) if count is None else count) - 1
    more = f" (and {others} more)" if others else ""
    return refused(
        Reason.INVALID_REQUEST,
        f"{field}: {description[:MAX_TEXT]}{more}",
        violations=violations,
    )


def _bad_request(violations: list[Violation]) -> error_details_pb2.BadRequest | None:
    if not violations:
        return None
    bad = error_details_pb2.BadRequest()
    for field, description in violations[:MAX_VIOLATIONS]:
        bad.field_violations.add(field=field[:MAX_FIELD], description=description[:MAX_TEXT])
    return bad


def failure(finish: Finish) -> Refused:
    """The status of a generation that ended with ERROR, or without anything to return."""
    if finish.reason is FinishReason.ERROR and finish.retryable:
        message = finish.error or "the engine was lost"
        return refused(Reason.ENGINE_LOST, message, retry_after_s=ENGINE_RETRY_S)
    if finish.reason is FinishReason.ERROR and finish.error == ERRORS[RULED_OUT]:
        return refused(Reason.INVALID_REQUEST, finish.error)
    if finish.reason is FinishReason.ERROR:
        return refused(Reason.GENERATION_FAILED, finish.error or "the generation failed")
    if finish.reason is FinishReason.DRAINED:
        return refused(Reason.DRAINING, "the server stopped", retry_after_s=ENGINE_RETRY_S)
    if finish.reason is FinishReason.DEADLINE:
        return refused(Reason.DEADLINE, "the deadline passed before the first token")
    return refused(Reason.INTERRUPTED, f"the generation ended with {finish.reason}")


def trailers(status: status_pb2.Status) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries a rich status beside the plain one."""
    return (("grpc-status-details-bin", status.SerializeToString()),)
