"""By which client the authorization server of an upstream is asked: everybody's, or one that may
also dial the hosts that the operator named for that very upstream.

What one upstream may have its issuer at says nothing about another one's.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.net.egress import Egress


class IssuerEgress:
    """`own`: by upstream; to be closed with `everybodys`."""

    def __init__(self, everybodys: Egress, own: Mapping[str, Egress] | None = None) -> None:
        self._everybodys, self._own = everybodys, dict(own or {})
        self._gone: list[Egress] = []

    def replace(self, own: Mapping[str, Egress]) -> None:
        """Have these of upstreams from now on. Who asks through another one goes on; its
        connections are closed with everybody's."""
        self._gone += self._own.values()
        self._own = dict(own)

    def of(self, upstream: str) -> Egress:
        return self._own.get(upstream, self._everybodys)

    def close(self) -> None:
        for each in (self._everybodys, *self._own.values(), *self._gone):
            each.close()
