"""A refusal or an error in words: what, why, which fields, and when to try again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status


def from_rpc_error(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The rich status of a failed call, or one made from its code and message."""
    try:
        rich = rpc_status.from_call(error)
    except ValueError:  # its details contradict the status of the call
        rich = None
    return rich or status_pb2.Status(code=error.code().value[0], message=error.details() or "")


def describe(status: status_pb2.Status) -> str:
    """Lines for a person: `CODE: message`, then one indented line per detail that is known."""
    name = enum_name(code_pb2.Code, status.code)
    # A single violation is the message, too.
    details = [line for line in _details(status) if line.strip() != status.message]
    return "\n".join([f"{name}: {status.message}", *details])


def enum_name(enum: Any, value: int) -> str:
    """The name of an enum value; its number if this client is too old to know it."""
    return str(enum.Name(value)) if value in enum.values() else str(value)


def _details(status: status_pb2.Status) -> Iterator[str]:
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    quota = error_details_pb2.QuotaFailure()
    for detail in status.details:
        if detail.Unpack(bad):
            for violation in bad.field_violations:
                yield f"  {violation.field}: {violation.description}"
        elif detail.Unpack(quota):
            for failure in quota.violations:
                yield f"  quota {failure.subject}: {failure.description}"
        elif detail.Unpack(retry):
            yield f"  try again in {retry.retry_delay.ToTimedelta().total_seconds():g} s"
