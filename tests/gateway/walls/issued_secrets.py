"""The registry of what issues secrets: every function of the gateway that draws one is found in its
source, and a `Witness` keeps what each of them drew while a test ran.

A new function that draws a secret is in it by itself; whoever adds one lets the canary test call it
too. What is drawn and is no secret stands in `NO_SECRETS`, with the reason.
"""

from __future__ import annotations

import ast
import inspect
import secrets
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from joserfc.jwk import RSAKey

import gateway
from gateway.tenancy.keys import changes as key_changes
from gateway.tenancy.keys import keys
from gateway.webhooks import endpoints

ROOT = Path(gateway.__file__).parent
MAKERS = {"random_secret", "new_secret", "generate_key"}
"""And whatever is called of the module `secrets`, but for comparing."""
NO_SECRETS = {
    "secret.seal": "a nonce, which stands beside what it encrypts",
    "auth.federation.external_login.start": "of one login elsewhere: sealed into its state",
    "secret.random_secret": "draws for its callers",
    "auth.login.sessions.challenge": "a passkey signs it in public; it is good once",
    "cli.main.gateway": "names a spool",
    "mcp.service.wiring.open_approvals": "tells two requests apart; deciding takes a credential",
    "secret._fresh_key": "the installation's own, in a file of its own: no request reaches it",
    "fleet.joining.relay.connect": "names a connection, of who has a certificate",
    "processes.worker_set._start": "names a process",
    "tenancy.keys.keys.new_secret": "draws for its callers",
    "vault.envelope.seal": "a key that stands wrapped beside what it encrypts, and a nonce",
    "vault.oauth.start": "of one sign-in elsewhere: sealed into its state, stored nowhere",
    "webhooks.standard_webhooks.new_secret": "draws for its callers",
}


@cache
def drawn_in_source() -> frozenset[str]:
    """`module.function` of all that call a maker, without `gateway.`."""
    found = set()
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and draws(function):
                found.add(f"{module}.{function.name}")
    return frozenset(found)


def draws(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    for each in ast.walk(function):
        if isinstance(each, ast.Name) and each.id in MAKERS:
            return True
        if isinstance(each, ast.Attribute):
            of_secrets = isinstance(each.value, ast.Name) and each.value.id == "secrets"
            if each.attr in MAKERS or (of_secrets and each.attr != "compare_digest"):
                return True
    return False


class Witness:
    """`drawn`: by function, what it drew."""

    def __init__(self) -> None:
        self.drawn: dict[str, list[str]] = {}

    def note(self, value: str) -> None:
        self.drawn.setdefault(caller(), []).append(value)

    @property
    def values(self) -> list[str]:
        return [value for values in self.drawn.values() for value in values]


def caller() -> str:
    """The function of the gateway that asked, past those that draw for others."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        name = f"{module.removeprefix('gateway.')}.{frame.f_code.co_name}"
        if module.startswith("gateway.") and name not in NO_SECRETS:
            return name
        frame = frame.f_back
    return "nobody"


def watch(monkeypatch: pytest.MonkeyPatch) -> Witness:
    """From here on, whatever is drawn is noted."""
    witness = Witness()

    def noting(make: Callable[..., str]) -> Callable[..., str]:
        def made(*args: Any, **options: Any) -> str:
            value = make(*args, **options)
            witness.note(value)
            return value

        return made

    def generate(*args: Any, **options: Any) -> RSAKey:
        key = generated(*args, **options)
        # In a thread of its own, where nobody who asked can be seen.
        exponent = str(key.as_dict(private=True)["d"])
        witness.drawn.setdefault("auth.oauth.tokens.signing_keys._add", []).append(exponent)
        return key

    generated = RSAKey.generate_key
    monkeypatch.setattr(RSAKey, "generate_key", staticmethod(generate))
    monkeypatch.setattr(secrets, "token_urlsafe", noting(secrets.token_urlsafe))
    for module in (keys, key_changes):
        monkeypatch.setattr(module, "new_secret", noting(keys.new_secret))
    monkeypatch.setattr(endpoints, "new_secret", noting(endpoints.new_secret))
    return witness
