"""grpc.health.v1 and reflection."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as reflection_pb

OVERALL = ""
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class Health:
    """Health of the server as a whole and of each service; all have the same.

    NOT_SERVING until told otherwise, and for good after `shut_down`. Watch pushes every change.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names = (OVERALL, *services)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def shut_down(self) -> None:
        await self._servicer.enter_graceful_shutdown()

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Serve reflection as v1 and, for older clients, v1alpha: the messages are the same."""
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    v1 = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers(REFLECTION_V1, {"ServerReflectionInfo": v1})
