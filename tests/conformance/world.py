"""Starts what the conformance tests share: a stack with a user who can sign in, two clients, an
https server with a client metadata document, and Node with what `make auth-conformance` installed.
The issuer is http://localhost: a passkey is bound to a name, never to an address."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bench.tools.ports import free_port
from gateway.audit.log import COMMAND_LINE
from gateway.auth.login.passwords import Passwords
from gateway.auth.oauth.clients.metadata import from_document
from gateway.auth.oauth.clients.store import SECRET_PEPPER_PURPOSE, create_client
from gateway.db import create_engine, tenant
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.secret import Peppers, Secret
from gateway.tenancy.members.users import create_user
from gateway.tenancy.orgs import find_org
from tests.stack import ROOT, Stack, running

HERE = Path(__file__).parent
KIT = ROOT / ".conformance" / "node_modules"
NODE = next(KIT.glob("node-*/bin/node"), KIT / "node")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
KITTED = [
    pytest.mark.slow,
    pytest.mark.skipif(not NODE.exists(), reason="make auth-conformance installs what this needs"),
]
BROWSED = pytest.mark.skipif(CHROMIUM is None, reason="no browser here: apt-get install chromium")
EMAIL, PASSWORD = "ann@example.com", "correct horse battery staple"
HIDDEN = re.compile(r'<input type="hidden" name="(\w+)"[^>]* value="([^"]*)">')
CONFIG = """
public_url = "http://localhost:PORT"
egress_to_loopback = true

[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"
"""
SCRIPT_S = 120.0


class World:
    """The stack and who is in it. `client_id`: a public client; `secret_id`, `secret`: a
    confidential one. `document_url`: the https URL at which a client describes itself."""

    def __init__(self, stack: Stack, callback_port: int, document_url: str) -> None:
        self.stack = stack
        self.redirect_uri = f"http://127.0.0.1:{callback_port}/callback"
        self.callback_port = callback_port
        self.document_url = document_url
        self.org_id = self.user_id = ""
        self.client_id = self.secret_id = self.secret = ""

    @property
    def issuer(self) -> str:
        return f"http://localhost:{self.stack.port}"

    @property
    def resource(self) -> str:
        return f"{self.issuer}/mcp/{self.org_id}"

    def allow(self, url: str) -> str:
        """Sign in and consent at `url`; where the browser is sent with the answer."""
        with httpx.Client(base_url=self.issuer) as browser:
            shown = browser.get(url)
            for _ in range(4):
                if shown.is_redirect:
                    location = shown.headers["location"]
                    if not location.startswith(("/", self.issuer)):
                        return location
                    shown = browser.get(location)
                    continue
                form = {name: html.unescape(v) for name, v in HIDDEN.findall(shown.text)}
                if 'name="password"' in shown.text:
                    form |= {"email": EMAIL, "password": PASSWORD}
                    shown = browser.post("/oauth/login", data=form)
                else:
                    shown = browser.post("/oauth/authorize", data=form | {"decision": "allow"})
            if shown.is_redirect:
                return str(shown.headers["location"])
        raise AssertionError(shown.text)

    def call(self, token: str) -> httpx.Response:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        headers = {"authorization": f"Bearer {token}"}
        return httpx.post(self.resource, json=message, headers=headers)

    def administer(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.stack.credentials['admin_key']}"}
        return httpx.request(method, f"{self.issuer}{path}", headers=headers, **options)

    async def populate(self) -> None:
        home = Home(self.stack.home)
        db = create_engine(embedded.postgres_url(home))
        passwords = Passwords()
        peppers = Peppers(Secret.load(home.secret), SECRET_PEPPER_PURPOSE)
        metadata = {
            "client_name": "Kit",
            "redirect_uris": [self.redirect_uri],
            "grant_types": ["authorization_code", "refresh_token"],
            "token_endpoint_auth_method": "none",
        }
        scopes = ["mcp:call", "inference", "offline_access", "openid", "email"]
        try:
            async with db.connect() as conn:
                org = await find_org(conn, name="default")
            hashed = await passwords.hash(PASSWORD)
            async with tenant(db, org.id) as conn:
                user = await create_user(
                    conn,
                    org_id=org.id,
                    email=EMAIL,
                    name="Ann",
                    role="owner",
                    actor=COMMAND_LINE,
                    password_hash=hashed,
                )
                made = [
                    await create_client(
                        conn,
                        peppers,
                        metadata=from_document({**metadata, "token_endpoint_auth_method": method}),
                        scopes=scopes,
                        actor=COMMAND_LINE,
                        org_id=org.id,
                    )
                    for method in ("none", "client_secret_basic")
                ]
        finally:
            passwords.close()
            await db.dispose()
        self.org_id, self.user_id = org.id, user.id
        self.client_id, self.secret_id = made[0].client.id, made[1].client.id
        assert made[1].client_secret is not None
        self.secret = made[1].client_secret


@contextmanager
def populated(folder: Path, config: str = CONFIG) -> Iterator[World]:
    with document_server(folder) as (document, server):
        with running(config=config, env={"SSL_CERT_FILE": str(folder / "trust.pem")}) as stack:
            world = World(stack, free_port(), document)
            # As the SDK says what it is, with any port, for a native client has none of its own.
            server.document = {  # type: ignore[attr-defined]
                "client_id": document,
                "client_name": "Described",
                "redirect_uris": [world.redirect_uri],
                "grant_types": ["authorization_code", "refresh_token"],
                "response_types": ["code"],
                "token_endpoint_auth_method": "none",
            }
            asyncio.run(world.populate())
            yield world


@contextmanager
def document_server(folder: Path) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """Serves its `document` over TLS; folder/trust.pem is the certificate to trust."""
    chain, key = certificate(folder)

    class Serve(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(self.server.document).encode()  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Not to stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Serve)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://localhost:{server.server_port}/client.json", server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of localhost, its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain, private = folder / "trust.pem", folder / "key.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return chain, private


def kit_script(name: str) -> Path:
    """Beside the packages, where Node looks for them."""
    script = KIT.parent / name
    script.write_text((HERE / name).read_text())
    return script


def run_script(name: str, **given: Any) -> dict[str, Any]:
    """Return what the script prints in its last line, as JSON. It is given its arguments as
    JSON."""
    kit_script("browser.mjs")
    done = subprocess.run(
        [str(NODE), str(kit_script(name)), json.dumps({**given, "chromium": CHROMIUM})],
        capture_output=True,
        text=True,
        timeout=SCRIPT_S,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
