"""An HTTP API in a thread, with an OpenAPI document, by somebody who knows nothing of MCP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import uvicorn
from litestar import Litestar, Request, get, post
from litestar.params import FromPath, FromQuery, JSONBody

from tests.gateway.routes.openapi.running import TIMEOUT_S


class Order(msgspec.Struct):
    item: str
    count: int


class Shop:
    """It keeps who asked for what."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self.url = ""

    def app(self) -> Litestar:
        def note(request: Request[Any, Any, Any], what: str) -> None:
            self.seen.append((what, request.headers.get("authorization")))

        @get("/items/{item:str}", operation_id="look_up")
        async def look_up(
            request: Request[Any, Any, Any], item: FromPath[str], most: FromQuery[int] = 3
        ) -> Order:
            note(request, f"{item} {most}")
            return Order(item, most)

        @post("/orders", operation_id="order")
        async def order(request: Request[Any, Any, Any], data: JSONBody[Order]) -> Order:
            note(request, f"order {data.item}")
            return data

        return Litestar([look_up, order])


@contextmanager
def selling() -> Iterator[Shop]:
    shop = Shop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shop.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(shop.app(), log_config=None, access_log=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="shop")
        thread.start()
        try:
            yield shop
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
