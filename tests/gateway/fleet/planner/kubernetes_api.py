"""A server on the loopback that speaks what the reference of Kubernetes' API says of the scale of
one StatefulSet, over TLS, and the files that a pod has of its service account."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.fleet.planner.scale_api import ScaleApi
from gateway.settings.kubernetes import KubernetesConfig

POOL = KubernetesConfig(stateful_set="penny")
PATH = "/apis/apps/v1/namespaces/models/statefulsets/penny/scale"
REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict"}
CANNOT = 'statefulsets.apps "penny" is forbidden: User "system:serviceaccount:models:home" cannot'
CONFLICT = 'Operation cannot be fulfilled on statefulsets.apps "penny": it has been modified'


class KubernetesApi:
    """The API. `folder`: of the credentials."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.replicas, self.version = 1, 1
        self.token = "first"
        self.patches: list[dict[str, Any]] = []
        """Those that were taken."""
        self.num_asked = 0
        self.conflicts = 0
        """So many more changes meet another one."""
        self.status: int | None = None
        """Answered to all, in the place of what is right."""
        self.forbids_patch = False
        self.hangs = False
        self.raw: bytes | None = None
        """The body of every answer, in the place of what is right."""
        self.others_replicas: int | None = None
        """The number that somebody else sets at the next change."""
        self.url = ""
        self._server: asyncio.Server | None = None
        folder.mkdir()
        (folder / "namespace").write_text("models")

    async def begin(self) -> None:
        """Listen with a certificate that is new, and mount it beside the token."""
        context = self._certify()
        (self.folder / "token").write_text(f"{self.token}\n")
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def end(self) -> None:
        assert self._server is not None
        self._server.close()

    def client(self, config: KubernetesConfig = POOL, timeout_s: float = 30.0) -> ScaleApi:
        return ScaleApi(config, url=self.url, credentials=self.folder, timeout_s=timeout_s)

    def _certify(self) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
        host = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        now = datetime.now(tz=UTC)
        made = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.SubjectAlternativeName([host]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = made.public_bytes(serialization.Encoding.PEM)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (self.folder / "ca.crt").write_bytes(pem)
        both = self.folder.parent / "server.pem"
        both.write_bytes(private + pem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(both)
        return context

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            request, *lines = head.rstrip().split("\r\n")
            headers = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.num_asked += 1
            if self.hangs:
                await reader.read()
                return
            method, path, _ = request.split()
            status, answer = self._answer(method, path, headers, body)
            content = self.raw if self.raw is not None else msgspec.json.encode(answer)
            said = f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n"
            writer.write(said.encode() + content)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()

    def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, Any]]:
        if headers.get("authorization") != f"Bearer {self.token}":
            return refusal(401, "Unauthorized")
        if self.status is not None:
            return refusal(self.status, CANNOT if self.status == 403 else "what is wrong")
        if path != PATH:
            return refusal(404, f"{path} not found")
        if method == "GET":
            return 200, self._scale()
        if method != "PATCH" or headers.get("content-type") != "application/merge-patch+json":
            return refusal(415, "the body of the request was in an unknown format")
        if self.forbids_patch:
            return refusal(403, CANNOT)
        patch = msgspec.json.decode(body)
        if self.others_replicas is not None:
            self.replicas, self.others_replicas = self.others_replicas, None
            self.version += 1
        if self.conflicts:
            self.conflicts -= 1
            self.version += 1
        if patch["metadata"]["resourceVersion"] != str(self.version):
            return refusal(409, CONFLICT)
        self.patches.append(patch["spec"])
        self.replicas = patch["spec"]["replicas"]
        self.version += 1
        return 200, self._scale()

    def _scale(self) -> dict[str, Any]:
        spec = {"replicas": self.replicas} if self.replicas else {}
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {
                "name": "penny",
                "namespace": "models",
                "resourceVersion": str(self.version),
            },
            "spec": spec,
            "status": {"replicas": self.replicas, "selector": "app=penny"},
        }


def refusal(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": REASONS.get(status, "Unknown"),
        "code": status,
    }


@asynccontextmanager
async def kubernetes_api(folder: Path) -> AsyncIterator[KubernetesApi]:
    made = KubernetesApi(folder / "serviceaccount")
    await made.begin()
    yield made
    await made.end()
