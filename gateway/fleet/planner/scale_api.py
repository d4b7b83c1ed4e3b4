"""Asks the API of the Kubernetes cluster around this process for the scale of a StatefulSet, and
changes it, as a pod does that has a service account.

    GET    /apis/apps/v1/namespaces/NAMESPACE/statefulsets/NAME/scale
    PATCH  the same, with a merge patch of spec.replicas

Both answer a Scale of autoscaling/v1, or a Status that says in a message what is wrong. The token
and the certificates are read from their files for each request: the kubelet replaces them while the
pod runs.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from foundation.http1 import HttpClientError, Pool, request_head
from gateway.settings.file import one_line
from gateway.settings.kubernetes import KubernetesConfig

API = "https://kubernetes.default.svc"
"""The name of the API inside of every cluster, which its certificate has."""
CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which `token`, `ca.crt` and `namespace` are mounted."""
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1024 * 1024
MAX_TRIES = 3
"""The tries of a change that meets others: the status of the pods is written all the time."""


class ScaleError(Exception):
    """An error of a scale that was not read or changed: one line that says why."""


class ScaleConflict(ScaleError):
    """An error of a change of what somebody else changed meanwhile."""


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Spec(msgspec.Struct):
    replicas: int = 0
    """Left out where it is 0."""


class _Scale(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec


class _Status(msgspec.Struct):
    message: str = ""


class _Credentials(msgspec.Struct):
    token: str
    namespace: str
    trust: ssl.SSLContext


class ScaleApi:
    """The scale of one StatefulSet. `url`: of the API; `credentials`: the folder of the mounted
    files."""

    def __init__(
        self,
        config: KubernetesConfig,
        *,
        url: str = API,
        credentials: Path = CREDENTIALS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._config, self._url, self._credentials = config, url, credentials
        self._timeout_s = timeout_s

    async def replicas(self) -> int:
        """Return how many pods are wanted now. Raises: ScaleError."""
        return (await self._ask("GET")).spec.replicas

    async def expect(self, replicas: int) -> str:
        """Return the version of the scale, if so many pods are wanted. Raises: ScaleError."""
        found = await self._ask("GET")
        if found.spec.replicas != replicas:
            name = self._config.stateful_set
            raise ScaleError(f"{name} has {found.spec.replicas} replicas by now, not {replicas}")
        return found.metadata.resource_version

    async def change(self, before: int, after: int) -> None:
        """Have `after` pods wanted, if `before` are. Raises: ScaleError."""
        conflict = None
        for _ in range(MAX_TRIES):
            version = await self.expect(before)
            patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": after}}
            try:
                await self._ask("PATCH", msgspec.json.encode(patch))
            except ScaleConflict as error:
                conflict = error
            else:
                return
        assert conflict is not None
        raise conflict

    async def _ask(self, method: str, body: bytes = b"") -> _Scale:
        """Raises: ScaleError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                status, content = await self._exchange(method, body)
        except TimeoutError:
            what = f"the API of Kubernetes does not answer within {self._timeout_s:g} s"
            raise ScaleError(what) from None
        except HttpClientError as error:
            why = one_line(str(error.__cause__ or error))
            raise ScaleError(f"the API of Kubernetes is not reached: {why}") from None
        if status != 200:
            why = f"the API of Kubernetes answers {status}: {_message_of(content)}"
            raise ScaleConflict(why) if status == 409 else ScaleError(why)
        try:
            return msgspec.json.decode(content, type=_Scale)
        except msgspec.MsgspecError as error:
            why = one_line(str(error))
            raise ScaleError(f"what the API of Kubernetes answers is no Scale: {why}") from None

    async def _exchange(self, method: str, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of an answer. Raises: HttpClientError, ScaleError."""
        found = self._read_credentials()
        namespace = self._config.namespace or found.namespace
        path = f"namespaces/{namespace}/statefulsets/{self._config.stateful_set}/scale"
        headers = [
            (b"Host", urlsplit(self._url).netloc.encode()),
            (b"Authorization", b"Bearer " + found.token.encode()),
            (b"Accept", b"application/json"),
            (b"Connection", b"close"),
        ]
        if body:
            headers.append((b"Content-Type", b"application/merge-patch+json"))
            headers.append((b"Content-Length", str(len(body)).encode()))
        pool = Pool(self._url, max_connections=1, max_idle=0, idle_s=0, trust=found.trust)
        try:
            connection = await pool.connect()
            connection.send(request_head(method, f"/apis/apps/v1/{path}", headers) + body)
            status, _ = await connection.head(None)
            content = bytearray()
            while data := await connection.read(None):
                content += data
                if len(content) > MAX_ANSWER_BYTES:
                    what = f"the API of Kubernetes answers more than {MAX_ANSWER_BYTES} bytes"
                    raise ScaleError(what)
            return status, bytes(content)
        finally:
            pool.close()

    def _read_credentials(self) -> _Credentials:
        """Raises: ScaleError."""
        at = self._credentials
        try:
            token, namespace, certificates = (
                (at / name).read_text().strip() for name in ("token", "namespace", "ca.crt")
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise ScaleError(f"{at}: no service account's credentials here: {why}") from None
        try:
            trust = ssl.create_default_context(cadata=certificates)
        except (ssl.SSLError, ValueError) as error:
            raise ScaleError(f"{at / 'ca.crt'}: {one_line(str(error))}") from None
        return _Credentials(token=token, namespace=namespace, trust=trust)


def _message_of(content: bytes) -> str:
    """Return what the API says is wrong."""
    try:
        told = msgspec.json.decode(content, type=_Status).message
    except msgspec.MsgspecError:
        told = ""
    return one_line(told) or "it says no more"
