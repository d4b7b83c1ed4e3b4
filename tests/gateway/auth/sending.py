"""Makes what clients send: credentials, assertions, proofs, forms."""

from __future__ import annotations

import base64
import secrets
from typing import Any
from urllib.parse import quote_plus

from joserfc import jwt
from joserfc.jwk import ECKey

from gateway.auth.oauth import rfc9449_dpop
from gateway.auth.oauth.rfc7523_assertion import TYPE
from tests.gateway.auth.parts import ISSUER, NOW
from tests.gateway.auth.world import (
    REDIRECT,
    VERIFIER,
    World,
)


def basic(client_id: str, secret: str | None) -> dict[str, str]:
    pair = f"{quote_plus(client_id)}:{quote_plus(secret or '')}"
    return {"authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def assertion(key: Any, client_id: str, **changes: Any) -> dict[str, str]:
    claims = {
        "iss": client_id,
        "sub": client_id,
        "aud": ISSUER,
        "jti": secrets.token_hex(8),
        "iat": int(NOW),
        "exp": int(NOW) + 60,
        **changes,
    }
    header = {"alg": "ES256" if isinstance(key, ECKey) else "RS256", "kid": key.kid}
    token = jwt.encode(header, claims, key, algorithms=[header["alg"]])
    return {"client_assertion_type": TYPE, "client_assertion": token}


def proof(key: Any, **changes: Any) -> str:
    claims = {
        "jti": secrets.token_hex(8),
        "htm": "POST",
        "htu": f"{ISSUER}/oauth/token",
        "iat": int(NOW),
        **changes,
    }
    claims = {name: value for name, value in claims.items() if value is not None}
    header = {"alg": "ES256", "typ": "dpop+jwt", "jwk": key.as_dict(private=False)}
    return jwt.encode(
        header, claims, key, registry=rfc9449_dpop.ProofJwsRegistry(algorithms=["ES256"])
    )


async def code_form(world: World, client: Any, **more: Any) -> dict[str, str]:
    code, _ = await world.code(client, **more)
    return {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": REDIRECT,
        "code_verifier": VERIFIER,
    }


CREDENTIALS = {"grant_type": "client_credentials"}
