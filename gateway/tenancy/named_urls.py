"""Checks the URLs that a tenant names for the gateway to ask: as they are registered, by what
would refuse them when they are asked."""

from __future__ import annotations

from gateway.net.egress import Egress, ForbiddenTarget
from gateway.tenancy.errors import InvalidField


async def check_url(egress: Egress, field: str, url: str) -> None:
    """Raises: InvalidField."""
    try:
        await egress.check(url)
    except ForbiddenTarget as error:
        detail = "is not allowed"
        raise InvalidField(field, f"{detail}: {error}", detail=detail) from None
