"""The metadata of this authorization server (RFC 8414), also used as OpenID Connect discovery."""

from __future__ import annotations

from typing import Any

from gateway.auth.oauth import rfc7523_assertion, rfc9449_dpop
from gateway.auth.oauth.clients.metadata import AUTH_METHODS, GRANT_TYPES
from gateway.auth.oauth.tokens.signing_keys import ALGORITHM
from gateway.permissions import SCOPES

AUTHORIZATION_PATH = "/oauth/authorize"
TOKEN_PATH = "/oauth/token"
JWKS_PATH = "/oauth/jwks.json"
REGISTRATION_PATH = "/oauth/register"
REVOCATION_PATH = "/oauth/revoke"
INTROSPECTION_PATH = "/oauth/introspect"
USERINFO_PATH = "/oauth/userinfo"
METADATA_PATHS = ("/.well-known/oauth-authorization-server", "/.well-known/openid-configuration")


def metadata(issuer: str) -> dict[str, Any]:
    confidential = sorted(AUTH_METHODS - {"none"})
    methods = sorted(AUTH_METHODS)
    algorithms = list(rfc7523_assertion.ALGORITHMS)
    return {
        "issuer": issuer,
        "authorization_endpoint": issuer + AUTHORIZATION_PATH,
        "token_endpoint": issuer + TOKEN_PATH,
        "jwks_uri": issuer + JWKS_PATH,
        "registration_endpoint": issuer + REGISTRATION_PATH,
        "revocation_endpoint": issuer + REVOCATION_PATH,
        "introspection_endpoint": issuer + INTROSPECTION_PATH,
        "userinfo_endpoint": issuer + USERINFO_PATH,
        "scopes_supported": sorted(SCOPES),
        "response_types_supported": ["code"],
        "response_modes_supported": ["query"],
        "grant_types_supported": sorted(GRANT_TYPES),
        "code_challenge_methods_supported": ["S256"],
        "token_endpoint_auth_methods_supported": methods,
        "token_endpoint_auth_signing_alg_values_supported": algorithms,
        "revocation_endpoint_auth_methods_supported": methods,
        "revocation_endpoint_auth_signing_alg_values_supported": algorithms,
        "introspection_endpoint_auth_methods_supported": confidential,
        "introspection_endpoint_auth_signing_alg_values_supported": algorithms,
        "authorization_response_iss_parameter_supported": True,
        "client_id_metadata_document_supported": True,
        "dpop_signing_alg_values_supported": list(rfc9449_dpop.ALGORITHMS),
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": [ALGORITHM],
        "claims_supported": ["sub", "iss", "aud", "exp", "iat", "auth_time", "name", "email"],
        "claims_parameter_supported": False,
        "request_parameter_supported": False,
        "request_uri_parameter_supported": False,
    }
