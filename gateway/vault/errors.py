"""The errors of the credentials of upstreams.

VaultError                code
├── CannotOpen            credential_unreadable     sealed under a lost secret, or tampered with
├── NoCredential          credential_missing        nobody has given one
├── ConsentNeeded         consent_needed            its owner has to sign in there (again)
├── SignInRefused         sign_in_refused           what came back from there was not begun here
└── IssuerUnavailable     upstream_auth_unavailable the upstream's authorization server is of no use

No text holds a value of a credential.
"""

from __future__ import annotations

from typing import ClassVar

from foundation.errors import LocatedError


class VaultError(LocatedError):
    """An error about the credential of an upstream, which `param` names."""

    code: ClassVar[str] = "vault_error"


class CannotOpen(VaultError):
    code = "credential_unreadable"


class NoCredential(VaultError):
    code = "credential_missing"


class ConsentNeeded(VaultError):
    code = "consent_needed"


class SignInRefused(VaultError):
    code = "sign_in_refused"


class IssuerUnavailable(VaultError):
    code = "upstream_auth_unavailable"
