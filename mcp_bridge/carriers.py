"""Which carrier a server of the configuration gets.

Above: `bridge`, `look`. Below: the carriers. One object for all servers of a process.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

import httpcore

from mcp_bridge.carrier import Carrier
from mcp_bridge.credentials import Credentials, CredentialSet, NobodysCredentials, Whose
from mcp_bridge.http1 import Pool
from mcp_bridge.http_carrier import HttpCarrier, Shown, shows_nothing
from mcp_bridge.upstream import (
    IDLE_S,
    MAX_CONNECTIONS,
    MAX_IDLE_CONNECTIONS,
    Addresses,
    ServerConfig,
)

NetworkOf = Callable[[Addresses], httpcore.AsyncNetworkBackend]


class Carriers:
    """`network_of`: who dials, and checks where to; None: anywhere. `credentials`: what servers are
    shown of ours."""

    def __init__(
        self,
        *,
        network_of: NetworkOf | None = None,
        trust: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._network_of, self._trust = network_of, trust
        self._credentials = credentials or NobodysCredentials()

    def open(self, config: ServerConfig, whose: Whose) -> Carrier:
        return HttpCarrier(config, self._pool(config), self._shown(config, whose))

    def _pool(self, config: ServerConfig) -> Pool:
        return Pool(
            config.url,
            max_connections=MAX_CONNECTIONS,
            max_idle=MAX_IDLE_CONNECTIONS,
            idle_s=IDLE_S,
            network=None if self._network_of is None else self._network_of(config.network),
            trust=self._trust,
        )

    def _shown(self, config: ServerConfig, whose: Whose) -> Shown:
        if config.credential == "none":
            return shows_nothing

        async def shown(refused: CredentialSet | None) -> CredentialSet:
            return await self._credentials.of(whose, config.name, refused)

        return shown


def whose_of(config: ServerConfig, org_id: str, user_id: str | None) -> Whose:
    """What is kept apart: tenants always, users where each is shown as who they are."""
    return Whose(org_id, user_id if config.credential == "user" else None)
