"""Tokens served to each tenant: who has had more than the others waits behind them.

A virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4): tokens are
charged as they are computed, and a tenant that comes (back) starts no lower than the least of those that have work, so
idleness saves nothing up. Differences within a quantum do not count: there the deadline decides.
"""

from __future__ import annotations

QUANTUM = 64
"""Tokens: tenants that differ by less are served by their deadlines alone."""
_MOST_IDLE = 4096
"""Counters kept of tenants without work, before those that no longer matter are dropped."""


class Shares:
    """The counters of the tenants that have work, and of those whose debt is not forgotten."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._served: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._least = 0.0

    def enter(self, tenant: str) -> None:
        """Note a sequence of the tenant's that wants to be served."""
        count = self._active.get(tenant, 0)
        if not count:
            if not self._active:
                self._served.clear()  # nobody was waiting for anything: no debts
                self._least = 0.0
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._least)
        self._active[tenant] = count + 1

    def leave(self, tenant: str) -> None:
        """Note the end of a sequence that entered."""
        count = self._active[tenant] - 1
        if count:
            self._active[tenant] = count
            return
        del self._active[tenant]
        self._settle()
        if len(self._served) - len(self._active) > _MOST_IDLE:
            self._served = {
                name: served for name, served in self._served.items() if name in self._active or served > self._least
            }

    def charge(self, tenant: str, tokens: int) -> None:
        """Count computed tokens."""
        served = self._served.get(tenant)
        if served is None:
            return
        self._served[tenant] = served + tokens
        if served <= self._least:
            self._settle()

    def excess(self, tenant: str) -> int:
        """Return by how many quanta the tenant has had more than the one that has had least."""
        return int((self._served.get(tenant, self._least) - self._least) / self._quantum)

    def counters(self) -> tuple[tuple[str, float], ...]:
        """Return (tenant, tokens above the least) of those that have work."""
        return tuple((tenant, self._served[tenant] - self._least) for tenant in self._active)

    def _settle(self) -> None:
        if self._active:
            self._least = min(self._served[tenant] for tenant in self._active)
