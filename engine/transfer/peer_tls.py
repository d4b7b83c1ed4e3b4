"""Encrypts what engines of other machines read, where both have joined one home: each shows the
certificate that the home's authority signed for it, and knows others by that authority alone.

The file is that of `engine.transport.join_identity`. It is read for each connection: certificates
are renewed while the engine runs.
"""

from __future__ import annotations

import re
import socket
import ssl
from pathlib import Path

from engine.transport.join_messages import ENGINE_NAME

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n", re.DOTALL)


class PeerTls:
    """The certificate of this engine. Every call raises OSError: no file yet, or another home's."""

    def __init__(self, identity: Path) -> None:
        self._identity = identity

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """Meet an engine that has connected, within the socket's time."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return context.wrap_socket(sock, server_side=True)

    def connect(self, sock: socket.socket) -> ssl.SSLSocket:
        """Meet the engine that was connected to, within the socket's time."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        return context.wrap_socket(sock, server_hostname=ENGINE_NAME)

    def _context(self, side: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self._identity)
        *_, authority = _CERTIFICATE.findall(self._identity.read_text())
        context.load_verify_locations(cadata=authority)
        return context
