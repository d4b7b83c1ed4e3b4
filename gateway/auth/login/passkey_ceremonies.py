"""The two ceremonies of WebAuthn, by the webauthn library: the options for the browser, and the
verification of its response.

A response that is wrong raises ValueError, KeyError, TypeError or RecursionError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec
import webauthn
from webauthn.helpers import base64url_to_bytes, bytes_to_base64url
from webauthn.helpers.exceptions import WebAuthnException
from webauthn.helpers.structs import (
    AuthenticatorSelectionCriteria,
    PublicKeyCredentialDescriptor,
    ResidentKeyRequirement,
    UserVerificationRequirement,
)

RELYING_PARTY = "Tollgate"


class PasskeyRegistration(msgspec.Struct, frozen=True):
    credential_id: str
    public_key: bytes
    sign_count: int


class Ceremonies:
    """The ceremonies of one relying party: the host of `public_url`, from pages of its origin
    alone."""

    def __init__(self, public_url: str) -> None:
        self._origin = public_url.rstrip("/")
        self._rp_id = urlsplit(public_url).hostname or ""

    def registration_options(
        self,
        *,
        user_id: str,
        user_name: str,
        display_name: str,
        challenge: bytes,
        known: Iterable[str],
    ) -> str:
        """Return the JSON for `navigator.credentials.create()`."""
        options = webauthn.generate_registration_options(
            rp_id=self._rp_id,
            rp_name=RELYING_PARTY,
            user_id=user_id.encode(),
            user_name=user_name,
            user_display_name=display_name,
            challenge=challenge,
            authenticator_selection=AuthenticatorSelectionCriteria(
                resident_key=ResidentKeyRequirement.REQUIRED,
                user_verification=UserVerificationRequirement.REQUIRED,
            ),
            exclude_credentials=[
                PublicKeyCredentialDescriptor(id=base64url_to_bytes(each)) for each in known
            ],
        )
        return webauthn.options_to_json(options)

    @staticmethod
    def challenge_in(credential: Any) -> bytes:
        """Return the challenge that was signed. Raises: AttributeError, besides the module's."""
        data = json.loads(base64url_to_bytes(credential["response"]["clientDataJSON"]))
        return base64url_to_bytes(data["challenge"])

    def verify_registration(self, credential: Any, challenge: bytes) -> PasskeyRegistration:
        try:
            verified = webauthn.verify_registration_response(
                credential=credential,
                expected_challenge=challenge,
                expected_rp_id=self._rp_id,
                expected_origin=self._origin,
                require_user_verification=True,
            )
        except WebAuthnException as error:
            raise ValueError(type(error).__name__) from error
        return PasskeyRegistration(
            bytes_to_base64url(verified.credential_id),
            verified.credential_public_key,
            verified.sign_count,
        )

    def sign_in_options(self, challenge: bytes) -> str:
        """Return the JSON for `navigator.credentials.get()`. It names no account: the passkey
        does."""
        options = webauthn.generate_authentication_options(
            rp_id=self._rp_id,
            challenge=challenge,
            user_verification=UserVerificationRequirement.REQUIRED,
        )
        return webauthn.options_to_json(options)

    def verify_sign_in(
        self, credential: Any, challenge: bytes, *, public_key: bytes, sign_count: int
    ) -> int:
        """Verify the response, and return the authenticator's new counter."""
        try:
            verified = webauthn.verify_authentication_response(
                credential=credential,
                expected_challenge=challenge,
                expected_rp_id=self._rp_id,
                expected_origin=self._origin,
                credential_public_key=public_key,
                credential_current_sign_count=sign_count,
                require_user_verification=True,
            )
        except WebAuthnException as error:
            raise ValueError(type(error).__name__) from error
        return verified.new_sign_count
