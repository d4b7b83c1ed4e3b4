"""The key and the certificate by which a home knows an engine that joined it: one file of the
engine's machine, made at the first join.

The file holds the private key, the engine's certificate and the home's authority, as PEM.
"""

from __future__ import annotations

import fcntl
import os
import ssl
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from engine.errors import ConfigError
from engine.transport.join_messages import JoinToken

RENEW_PART = 1 / 3
"""A certificate is renewed when that part of its life is left."""
_PEM = serialization.Encoding.PEM


class JoinIdentity:
    """The file at `path`, which one engine at a time may hold."""

    def __init__(
        self,
        path: Path,
        token_path: Path,
        *,
        token_name: str = "--token",
        begins_anew: bool = False,
    ) -> None:
        """`token_name`: what the token is called in the settings of who uses it. `begins_anew`: the
        home is asked for a certificate by the token, whatever the file has; it has that until the
        home has signed. Raises: ConfigError, when another engine holds it, it is broken, or there
        is neither it nor a token."""
        self.path = path
        self.token: JoinToken | None = None
        self._certificate: x509.Certificate | None = None
        self._lock = self._hold()
        try:
            if begins_anew or not path.exists():
                self._begin(token_path, token_name)
            else:
                self._read()
        except BaseException:
            self.release()
            raise

    @property
    def is_admitted(self) -> bool:
        """Tell whether the home has signed a certificate."""
        return self._certificate is not None

    @property
    def wants_certificate(self) -> bool:
        """Tell whether there is none yet, or the one there is ends soon."""
        if self._certificate is None:
            return True
        begin = self._certificate.not_valid_before_utc.timestamp()
        end = self._certificate.not_valid_after_utc.timestamp()
        return time.time() > end - RENEW_PART * (end - begin)

    def request(self) -> bytes:
        """Return a certificate signing request for the key (DER)."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
        builder = x509.CertificateSigningRequestBuilder().subject_name(name)
        made = builder.sign(self._key, hashes.SHA256())
        return made.public_bytes(serialization.Encoding.DER)

    def keep(self, certificate: bytes) -> None:
        """Keep what the home signed (PEM). Raises: ConfigError."""
        try:
            self._certificate = x509.load_pem_x509_certificate(certificate)
        except ValueError as error:
            raise ConfigError(f"the home signed what is no certificate: {error}") from None
        self._write()

    def context(self) -> ssl.SSLContext:
        """Return how the home is asked: it is known by its authority alone, and this engine by its
        certificate once it has one."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self._authority)
        if self.is_admitted:
            context.load_cert_chain(self.path)
        return context

    def release(self) -> None:
        os.close(self._lock)

    def _hold(self) -> int:
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--identity {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            raise ConfigError(
                f"--identity {self.path}: another engine runs with it; give each its own"
            ) from None
        return held

    def _read(self) -> None:
        try:
            found = self.path.read_bytes()
            key = serialization.load_pem_private_key(found, password=None)
            own, authority = x509.load_pem_x509_certificates(found)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--identity {self.path}: {error}") from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key, self._certificate = key, own
        self._authority = authority.public_bytes(serialization.Encoding.DER)

    def _begin(self, token_path: Path, token_name: str) -> None:
        """Make a key that the home of a token will know."""
        try:
            text = token_path.read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise ConfigError(f"{token_name} {token_path}: {error.strerror}") from None
        try:
            self.token = JoinToken.of_text(text)
            x509.load_der_x509_certificate(self.token.authority)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{token_name} {token_path}: {error}") from None
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._authority = self.token.authority

    def _write(self) -> None:
        assert self._certificate is not None
        key = self._key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        authority = x509.load_der_x509_certificate(self._authority).public_bytes(_PEM)
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            fresh.unlink(missing_ok=True)
            written = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(written, "wb") as file:
                file.write(key + self._certificate.public_bytes(_PEM) + authority)
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(self.path)
        except OSError as error:
            raise ConfigError(f"--identity {self.path}: {error.strerror}") from None
