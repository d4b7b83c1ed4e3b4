"""A consent at an upstream that nobody configured more of than its URL: from its challenge to where
the browser goes.

Asked for is what the upstream's challenge names, or else all that its metadata lists, besides what
was granted before; a refresh token where the issuer gives one for a scope.
"""

from __future__ import annotations

import msgspec

from gateway.vault.challenge import Challenge, split_scopes
from gateway.vault.discovery import DiscoveredServer, Discovery
from gateway.vault.oauth import Consents
from gateway.vault.registration import KnownClient, Registration
from gateway.vault.token_endpoint import UpstreamClient

OFFLINE = "offline_access"


class SignIn:
    """One per process."""

    def __init__(
        self, discovery: Discovery, registration: Registration, consents: Consents
    ) -> None:
        self._discovery, self._registration = discovery, registration
        self._consents = consents

    async def start(
        self,
        *,
        upstream: str,
        url: str,
        challenge: Challenge,
        org_id: str,
        user_id: str | None,
        began: str,
        browser: str,
        known: KnownClient | None = None,
        before: UpstreamClient | None = None,
        is_refused: bool = False,
    ) -> str:
        """Return where to send the browser, as `Consents.start` does. url: the upstream's; `known`:
        what the operator registered there; `before`: the client of the consent that there is;
        `is_refused`: its issuer takes it no more, or who consented with it.

        Raises: IssuerUnavailable, SignInRefused.
        """
        issuer = None if known is None else known.issuer
        found = await self._discovery.find(upstream, url, challenge, issuer=issuer)
        client = await self._registration.identify(
            upstream, found.server, known=known, before=None if is_refused else before
        )
        asked = scopes(found, challenge, before)
        return self._consents.start(
            msgspec.structs.replace(
                client, scope=" ".join(asked) or None, resource=found.resource.resource
            ),
            org_id=org_id,
            upstream=upstream,
            user_id=user_id,
            began=began,
            browser=browser,
            carries_client=True,
            needs_iss=found.server.authorization_response_iss_parameter_supported,
        )


def scopes(
    found: DiscoveredServer, challenge: Challenge, before: UpstreamClient | None
) -> tuple[str, ...]:
    """Return each scope once. What was granted elsewhere is not asked for here."""
    is_same = before is not None and before.issuer == found.server.issuer
    granted = split_scopes(before.scope or "") if before is not None and is_same else ()
    wanted = challenge.scopes or split_scopes(" ".join(found.resource.scopes_supported))
    offline = (OFFLINE,) if OFFLINE in found.server.scopes_supported else ()
    return tuple(dict.fromkeys((*granted, *wanted, *offline)))
