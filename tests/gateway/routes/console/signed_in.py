"""Somebody who is signed in at a running worker, as their browser sends it: a cookie and the token
of a page."""

from __future__ import annotations

from typing import Any

import msgspec
import requests

from gateway.auth.login.login import PASSWORD, LoginOrigin
from gateway.db import tenant
from gateway.routes.console.frame.page import TOKEN_HEADER
from gateway.routes.console.frame.request import PURPOSE
from gateway.routes.console.playground import COMPLETIONS
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running

HERE = LoginOrigin(address="127.0.0.1", device_cookie=None, request_id=None)
COOKIE = "tollgate_session"


class Person(msgspec.Struct, kw_only=True):
    worker: Running
    org_id: str
    user_id: str
    cookie: str

    @property
    def token(self) -> str:
        seals = self.worker.services.authorization.seals
        return seals.form_token(self.cookie, PURPOSE)

    def ask(self, payer: str, *, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """Ask a model; `headers`: instead of those of the page."""
        sent = {"model": "far", "messages": [{"role": "user", "content": "hi"}], **body}
        return requests.post(
            self.worker.url + COMPLETIONS,
            params={"payer": payer},
            json=sent,
            headers={TOKEN_HEADER: self.token, **(headers or {})},
            cookies={COOKIE: self.cookie} if self.cookie else {},
            stream=bool(body.get("stream")),
            timeout=TIMEOUT_S,
        )


def sign_in(worker: Running, user_id: str, org_id: str | None = None) -> Person:
    org_id = org_id or worker.org_id

    async def start() -> str:
        login, found = worker.services.authorization.login, worker.services
        async with tenant(found.db, org_id) as conn:
            return (await login.start(conn, org_id, user_id, PASSWORD, HERE)).session

    return Person(worker=worker, org_id=org_id, user_id=user_id, cookie=worker.run(start()))
