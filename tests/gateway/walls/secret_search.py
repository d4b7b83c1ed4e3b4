"""Looks for issued secrets in a text, and in each answer of the application."""

from __future__ import annotations

import base64
from typing import Any

import httpx
from joserfc.util import urlsafe_b64decode
from litestar import Litestar

from tests.gateway.auth.browsing import new_browser
from tests.gateway.walls.issued_secrets import Witness

TOKENS = ("access_token", "refresh_token", "id_token")


class Search:
    """All that was issued, and where it may have gone."""

    def __init__(self, witness: Witness, *known: str) -> None:
        self.witness = witness
        self.signed = list(known)
        """Secrets that the witness did not draw: passwords, draws of other processes, signed
        tokens."""

    @property
    def issued(self) -> list[str]:
        return list(dict.fromkeys([*self.witness.values, *self.signed]))

    def found_in(self, text: str, *, but: int = 0) -> list[str]:
        """Those of the first `len(issued) - but` that stand in `text`."""
        known = self.issued
        return [s for s in known[: len(known) - but] if any(each in text for each in forms(s))]


def forms(secret: str) -> tuple[str, ...]:
    raw = secret.encode()
    found = [secret, raw.hex(), base64.b64encode(raw).decode().rstrip("=")]
    if len(secret) > 300 and "." not in secret:  # a private exponent
        found.append(urlsafe_b64decode(raw).hex())
    return tuple(found)


class Caller:
    """Asks, and looks at every answer: nothing that was issued before may stand in it, and what it
    issues stands there once, but for an answer that is `told_again` or replayed."""

    def __init__(self, app: Litestar, search: Search) -> None:
        self.app, self.search = app, search

    async def __call__(
        self,
        method: str,
        path: str,
        key: str | None = None,
        *,
        told_again: bool = False,
        **options: Any,
    ) -> httpx.Response:
        before = self.search.issued
        headers = {**options.pop("headers", {})}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        async with new_browser(self.app) as client:
            answer: httpx.Response = await client.request(method, path, headers=headers, **options)
        said = answer.text + str(answer.headers)
        if not told_again and answer.headers.get("idempotent-replayed") != "true":
            told = [s for s in before if any(each in said for each in forms(s))]
            assert not told, f"{method} {answer.request.url.path} tells a secret again"
        for drawn in self.search.issued:
            assert drawn in before or said.count(drawn) <= 1, f"{method} {path} tells it twice"
        if answer.content and answer.headers["content-type"].startswith("application/json"):
            body = answer.json()
            self.search.signed += [body[name] for name in TOKENS if name in body]
        return answer
