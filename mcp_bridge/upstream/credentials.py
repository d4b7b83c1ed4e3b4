"""The credentials that a server is shown: values by the names of headers or of environment
variables.

The caller's own credential is never among them: it is not known here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol

import msgspec

CredentialOf = Literal["none", "tenant", "user"]
"""Whose a server is shown: nobody's, the tenant's, or the user's, and the tenant's for who has
none."""


class UpstreamOwner(msgspec.Struct, frozen=True):
    """The owner that a server is asked for. `user_id` None: for all of a tenant."""

    org_id: str
    user_id: str | None = None


class CredentialSet(msgspec.Struct, frozen=True):
    """The values that a server is shown. `name` names exactly these values, and is none of them."""

    name: str
    values: Mapping[str, str]

    def __repr__(self) -> str:
        return f"CredentialSet({self.name!r})"


NO_CREDENTIAL = CredentialSet("none", {})


class Refusal(msgspec.Struct, frozen=True):
    """A server did not take `credential`, or wants another one for what was asked."""

    credential: CredentialSet
    status: int
    challenge: str = ""
    """Its `WWW-Authenticate`."""
    is_last: bool = False
    """It was had in the place of one that was refused before: there is no third."""


class Credentials(Protocol):
    async def of(
        self, whose: UpstreamOwner, server: str, refused: Refusal | None = None
    ) -> CredentialSet:
        """refused: so that another is had if there is one.

        Raises: transport.NotSent.
        """
        ...


class NobodysCredentials:
    """The credentials for servers that are shown nothing."""

    async def of(
        self, whose: UpstreamOwner, server: str, refused: Refusal | None = None
    ) -> CredentialSet:
        return NO_CREDENTIAL


CredentialSource = Callable[[Refusal | None], Awaitable[CredentialSet]]
"""The credential for a request; where one was refused, another."""


async def no_credential(_refused: Refusal | None) -> CredentialSet:
    return NO_CREDENTIAL
