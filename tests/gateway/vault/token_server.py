"""An authorization server of an upstream, on a real socket: it rotates refresh tokens, and takes a
second use of one for a theft."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote

import msgspec


class TokenRequest(msgspec.Struct, frozen=True):
    headers: dict[str, str]
    form: dict[str, str]
    raw: bytes


class TokenServer:
    def __init__(self) -> None:
        self.asked: list[TokenRequest] = []
        self.url = ""
        self.expires_in: object = 3600
        self.rotates = True
        self.answer: tuple[int, dict[str, Any]] | bytes | None = None
        """In the place of what it would say; bytes: and not even HTTP."""
        self.hold = asyncio.Event()
        """Until it is set nobody is answered."""
        self.hold.set()
        self.stolen = False
        self._number = itertools.count(1)
        self._refresh: set[str] = set()
        self._used: set[str] = set()
        self._codes: dict[str, str] = {}

    def consent(self, authorization_url: str) -> dict[str, str]:
        """Return what a browser brings back when its user says yes."""
        asked = dict(parse_qsl(authorization_url.partition("?")[2]))
        assert asked["code_challenge_method"] == "S256" and asked["response_type"] == "code"
        code = f"code-{next(self._number)}"
        self._codes[code] = asked["code_challenge"]
        return {"code": code, "state": asked["state"]}

    def grants(self, grant_type: str) -> list[TokenRequest]:
        return [each for each in self.asked if each.form["grant_type"] == grant_type]

    def say(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        kind = form["grant_type"]
        if kind == "authorization_code":
            verifier = hashlib.sha256(form["code_verifier"].encode()).digest()
            challenge = base64.urlsafe_b64encode(verifier).decode().rstrip("=")
            if self._codes.pop(form["code"], None) != challenge:
                return 400, {"error": "invalid_grant"}
        elif kind == "refresh_token":
            shown = form["refresh_token"]
            self.stolen |= shown in self._used
            if self.stolen or shown not in self._refresh:
                return 400, {"error": "invalid_grant"}
            if self.rotates:
                self._refresh.discard(shown)
                self._used.add(shown)
        number = next(self._number)
        said: dict[str, Any] = {"access_token": f"access-{number}", "token_type": "Bearer"}
        if self.expires_in is not None:
            said["expires_in"] = self.expires_in
        if kind == "urn:ietf:params:oauth:grant-type:token-exchange":
            return 200, said | {
                "issued_token_type": "urn:ietf:params:oauth:token-type:access_token"
            }
        if kind == "authorization_code" or self.rotates:
            self._refresh.add(f"refresh-{number}")
            said["refresh_token"] = f"refresh-{number}"
        return 200, said

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            _, *lines = head.decode().rstrip().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (each.partition(":") for each in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            form = {k: v[0] for k, v in parse_qs(body.decode(), strict_parsing=True).items()}
            self.asked.append(TokenRequest(headers, form, head + body))
            await self.hold.wait()
            if isinstance(self.answer, bytes):
                writer.write(self.answer)
            else:
                status, said = self.answer or self.say(form)
                payload = json.dumps(said).encode()
                writer.write(
                    f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(payload)}\r\n\r\n".encode()
                    + payload
                )
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


def basic_of(asked: TokenRequest) -> tuple[str, str]:
    kind, _, value = asked.headers["authorization"].partition(" ")
    assert kind == "Basic"
    name, _, secret = base64.b64decode(value).decode().partition(":")
    return unquote(name), unquote(secret)


@asynccontextmanager
async def running(made: TokenServer | None = None) -> AsyncIterator[TokenServer]:
    made = made or TokenServer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()
