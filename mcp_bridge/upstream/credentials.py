"""The credentials that are sent to a server: values by the names of headers or of environment
variables.

The credential that the caller sent to us is never among them: it is not known here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol, TypeVar

import msgspec

T = TypeVar("T")

CredentialOf = Literal["none", "tenant", "user"]
"""The credential that a server gets: none, the tenant's, or the user's (the tenant's if they have
none)."""


class UpstreamOwner(msgspec.Struct, frozen=True):
    """The owner of connections and credentials. `user_id` None: all of a tenant."""

    org_id: str
    user_id: str | None = None


class CredentialSet(msgspec.Struct, frozen=True):
    """The values that a server gets. `name` identifies exactly these values and reveals none."""

    name: str
    values: Mapping[str, str]

    def __repr__(self) -> str:
        return f"CredentialSet({self.name!r})"


NO_CREDENTIAL = CredentialSet("none", {})


class Refusal(msgspec.Struct, frozen=True):
    """A server's refusal of `credential`, in general or for this request."""

    credential: CredentialSet
    status: int
    challenge: str = ""
    """Its `WWW-Authenticate`."""
    is_last: bool = False
    """It replaced a refused credential already: there will be no third."""


class Credentials(Protocol):
    async def of(
        self, owner: UpstreamOwner, server: str, refused: Refusal | None = None
    ) -> CredentialSet:
        """Return the credential of an owner for a server. `refused`: return another one, if there
        is one. Raises: transport.NotSent."""
        ...


CredentialSource = Callable[[Refusal | None], Awaitable[CredentialSet]]
"""Returns the credential for a request; after a refusal another one, if there is one."""


async def no_credential(_refused: Refusal | None) -> CredentialSet:
    return NO_CREDENTIAL


async def ask_with_credential(
    source: CredentialSource, ask: Callable[[CredentialSet], Awaitable[tuple[T, Refusal | None]]]
) -> T:
    """Return the answer of `ask`, asked again if the credential is refused and there is another.

    A refused request did nothing, so it may be repeated.
    """
    credential = await source(None)
    answer, refused = await ask(credential)
    again = credential if refused is None else await source(refused)
    if again is not credential:
        answer, refused = await ask(again)
        if refused is not None:
            await source(msgspec.structs.replace(refused, is_last=True))
    return answer
