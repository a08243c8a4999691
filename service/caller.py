"""Who calls, read from the metadata of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from service.generations import Caller
from service.handlers import Context
from service.spans import parent_from
from service.status import invalid

TENANT_KEY = "draftwire-tenant"
DEFAULT_TENANT = "default"
MAX_TENANT = 128
# A generation ends so much before its call's deadline that its last event still arrives.
MARGIN_S = 0.05


class Callers:
    """Makes callers. Without authentication the tenant is believed only under `trust_tenant`."""

    def __init__(self, trust_tenant: bool, clock: Callable[[], float]) -> None:
        self._trust_tenant = trust_tenant
        self._clock = clock

    def of(self, context: Context, *, bounded: bool) -> Caller:
        """The caller; with the call's deadline if that bounds its generation (`bounded`).

        Raises Refused for a trusted tenant that is not a name.
        """
        metadata = tuple((str(k), v) for k, v in context.invocation_metadata() or ())
        deadline = None
        remaining = context.time_remaining() if bounded else None
        if remaining is not None:
            deadline = self._clock() + remaining - MARGIN_S
        return Caller(self._tenant(dict(metadata)), parent_from(metadata), deadline)

    def _tenant(self, metadata: Mapping[str, str | bytes]) -> str:
        tenant = metadata.get(TENANT_KEY)
        if not self._trust_tenant or tenant is None:
            return DEFAULT_TENANT
        if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT:
            raise invalid([(TENANT_KEY, f"must have 1 to {MAX_TENANT} characters")])
        return tenant
