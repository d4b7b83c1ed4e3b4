"""The documented proxies, where they are installed: each passes a stream on as it comes, tells who
the client is, whatever the client says of that, and shows no metrics."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from bench.tools.ports import free_port
from tests.docs.runner import DOCUMENTED, blocks_of
from tests.gateway.net.test_egress import certificate
from tests.stack import ROOT

TIMEOUT_S = 60
HOST = "llm.example.com"
SITE = "/etc/letsencrypt/live/llm.example.com/"
NGINX = """
daemon off; pid FOLDER/pid; error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path FOLDER/body; proxy_temp_path FOLDER/proxy;
    fastcgi_temp_path FOLDER/fastcgi; uwsgi_temp_path FOLDER/uwsgi; scgi_temp_path FOLDER/scgi;
    include FOLDER/site.conf;
}
"""
CADDY = (
    "{\n\tadmin off\n\tauto_https disable_redirects\n\thttps_port PORT\n\tskip_install_trust\n}\n"
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FORGED = "X-Forwarded-For: 6.6.6.6\r\nForwarded: for=6.6.6.6\r\n"

Proxy = Callable[[Path, int, str], AbstractContextManager[None]]


def documented(language: str) -> str:
    blocks = blocks_of(ROOT / "docs" / "how-to" / "proxy.md")
    (found,) = (block.text for block in blocks if block.language == language)
    return found


class Upstream:
    """It sends one event, and the next one when it is told to."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.head = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.write(HEAD + b"d\r\ndata: first\n\n\r\n")
        await self.goes_on.wait()
        writer.write(b"c\r\ndata: last\n\n\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(upstream: Upstream) -> AsyncIterator[str]:
    server = await asyncio.start_server(upstream.answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextmanager
def nginx(folder: Path, port: int, address: str) -> Iterator[None]:
    certificate(folder)
    site = documented("nginx").replace(DOCUMENTED, address).replace("listen 443", f"listen {port}")
    for name in ("fullchain.pem", "privkey.pem"):
        site = site.replace(SITE + name, str(folder / "server.pem"))
    (folder / "site.conf").write_text(site)
    config = folder / "nginx.conf"
    config.write_text(NGINX.replace("FOLDER", str(folder)))
    with running(["nginx", "-c", str(config), "-p", str(folder)], folder):
        yield


@contextmanager
def caddy(folder: Path, port: int, address: str) -> Iterator[None]:
    """With a certificate of its own making, in place of one from a certificate authority."""
    site = documented("caddy").replace(DOCUMENTED, address)
    site = site.replace("{\n", "{\n\ttls internal\n", 1)
    config = folder / "Caddyfile"
    config.write_text(CADDY.replace("PORT", str(port)) + site)
    with running(["caddy", "run", "--adapter", "caddyfile", "--config", str(config)], folder):
        yield


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    home = {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **home}, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def ask(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask over TLS as a client who lies about its address, once the proxy answers at all."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                opened = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=tls, server_hostname=HOST
                )
                break
            except OSError:
                await asyncio.sleep(0.05)
    opened[1].write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n{FORGED}\r\n".encode())
    return opened


@pytest.mark.parametrize("program", [nginx, caddy], ids=["nginx", "caddy"])
async def test_a_documented_proxy_passes_streams_on_and_hides_the_metrics(
    program: Proxy, tmp_path: Path
) -> None:
    name = program.__name__
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    upstream, port = Upstream(), free_port()
    async with serving(upstream) as address, asyncio.timeout(TIMEOUT_S):
        with program(tmp_path, port, address):
            reader, writer = await ask(port, "/metrics")
            assert b" 404 " in await reader.readline()
            writer.close()
            reader, writer = await ask(port, "/v1/chat/completions")
            await reader.readuntil(b"data: first")  # and the upstream waits
            upstream.goes_on.set()
            await reader.readuntil(b"data: last")
            writer.close()
    head = upstream.head.lower()
    assert f"host: {HOST}" in head and "\r\nforwarded:" not in head
    (told,) = (line for line in head.splitlines() if line.startswith("x-forwarded-for:"))
    assert told.endswith("127.0.0.1")
