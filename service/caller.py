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
# gRPC rounds timeouts up on their way here, by up to this part: what seems to remain may not.
ROUNDING = 0.01
# The engine notices a deadline between steps. A step's time is kept free for that, but no more than
# this part of what remains: the last step may have been a slow one.
MOST_FOR_A_STEP = 0.25


class Callers:
    """Makes callers. Without authentication the tenant is believed only under `trust_tenant`.

    `step_s` gives the duration of the engine's last step, in seconds.
    """

    def __init__(
        self, trust_tenant: bool, clock: Callable[[], float], step_s: Callable[[], float]
    ) -> None:
        self._trust_tenant = trust_tenant
        self._clock = clock
        self._step_s = step_s

    def of(self, context: Context, *, bounded: bool) -> Caller:
        """The caller; with the call's deadline if that bounds its generation (`bounded`).

        Raises Refused for a trusted tenant that is not a name.
        """
        metadata = tuple((str(k), v) for k, v in context.invocation_metadata() or ())
        remaining = context.time_remaining() if bounded else None
        deadline = None if remaining is None else self._clock() + self._usable(remaining)
        return Caller(self._tenant(dict(metadata)), parent_from(metadata), deadline)

    def _usable(self, remaining: float) -> float:
        """How much of the call's remaining time the generation may use."""
        step = min(self._step_s(), remaining * MOST_FOR_A_STEP)
        return remaining * (1 - ROUNDING) - MARGIN_S - step

    def _tenant(self, metadata: Mapping[str, str | bytes]) -> str:
        tenant = metadata.get(TENANT_KEY)
        if not self._trust_tenant or tenant is None:
            return DEFAULT_TENANT
        if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT:
            raise invalid([(TENANT_KEY, f"must have 1 to {MAX_TENANT} characters")])
        return tenant
