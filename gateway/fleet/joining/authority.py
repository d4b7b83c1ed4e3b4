"""The certificate authority of one home: it signs the home's own certificate and those of the
engines that join it. Nobody else knows it; who is shown its certificate knows the home by it.
"""

from __future__ import annotations

import fcntl
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from engine.transport.join_messages import ENGINE_NAME, HOME_NAME

AUTHORITY_LIFE = timedelta(days=3650)
ENGINE_LIFE = timedelta(days=90)
SKEW = timedelta(minutes=5)
"""Certificates begin that much earlier: other clocks are a little behind."""
_PEM = serialization.Encoding.PEM
_DER = serialization.Encoding.DER


class BadRequest(Exception):
    """An error of an engine that asks for a certificate with what is no request for one."""


class SignedCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate for an engine. `serial`: as `serial_of` tells it of a connection."""

    pem: bytes
    serial: str
    expires_at: int
    """Unix seconds."""


class JoinAuthority:
    """The authority whose files are in `folder`; they are made where there are none."""

    def __init__(self, folder: Path) -> None:
        """Raises: OSError, ValueError if a file holds something else."""
        self._own, self._home = folder / "authority.pem", folder / "home.pem"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._own.exists():
                self._make()
        finally:
            os.close(lock)
        found = self._own.read_bytes()
        key = serialization.load_pem_private_key(found, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key, self._certificate = key, x509.load_pem_x509_certificate(found)

    @property
    def certificate(self) -> bytes:
        """Return its certificate (DER), by which others know what it signed."""
        return self._certificate.public_bytes(_DER)

    def server_context(self) -> ssl.SSLContext:
        """Return how the home answers: those who show a certificate of another authority are not
        let in, those who show none have a token."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(cadata=self.certificate)
        context.load_cert_chain(self._home)
        return context

    def sign(self, request: bytes) -> SignedCertificate:
        """Sign what an engine asks for (DER), and heed of its request the key alone. Raises:
        BadRequest."""
        try:
            asked = x509.load_der_x509_csr(request)
            key = asked.public_key()
            if not asked.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError("the signature is wrong, or it has no elliptic key")
        except ValueError as error:
            raise BadRequest(f"no certificate request: {error}") from None
        begin = datetime.now(UTC) - SKEW
        builder = _builder("engine", key, begin, begin + SKEW + ENGINE_LIFE)
        name = x509.SubjectAlternativeName([x509.DNSName(ENGINE_NAME)])
        made = self._signed(
            builder.add_extension(name, critical=False),
            ExtendedKeyUsageOID.CLIENT_AUTH,
            ExtendedKeyUsageOID.SERVER_AUTH,  # for other engines that joined, which read of it
        )
        return SignedCertificate(
            pem=made.public_bytes(_PEM),
            serial=f"{made.serial_number:x}",
            expires_at=int(made.not_valid_after_utc.timestamp()),
        )

    def _make(self) -> None:
        """Make the authority and the home's certificate. The authority's file is there last."""
        begin = datetime.now(UTC) - SKEW
        self._key, home_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        builder = _builder("Tollgate home", self._key.public_key(), begin, begin + AUTHORITY_LIFE)
        usage = x509.KeyUsage(
            **dict.fromkeys(
                ("digital_signature", "content_commitment", "key_encipherment", "key_agreement"),
                False,
            ),
            **dict.fromkeys(("data_encipherment", "encipher_only", "decipher_only"), False),
            **dict.fromkeys(("key_cert_sign", "crl_sign"), True),
        )
        self._certificate = (
            builder.issuer_name(_name("Tollgate home"))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        builder = _builder(HOME_NAME, home_key.public_key(), begin, begin + AUTHORITY_LIFE)
        name = x509.SubjectAlternativeName([x509.DNSName(HOME_NAME)])
        home = self._signed(
            builder.add_extension(name, critical=False), ExtendedKeyUsageOID.SERVER_AUTH
        )
        _write(self._home, home_key, home)
        _write(self._own, self._key, self._certificate)

    def _signed(
        self, builder: x509.CertificateBuilder, *purposes: x509.ObjectIdentifier
    ) -> x509.Certificate:
        known_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            builder.issuer_name(self._certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=True)
            .add_extension(known_by, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def serial_of(certificate: bytes) -> str:
    """Return the serial number of a certificate (DER), hexadecimal."""
    return f"{x509.load_der_x509_certificate(certificate).serial_number:x}"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    name: str, key: ec.EllipticCurvePublicKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _write(path: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    secret = key.private_bytes(
        _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    written = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(written, "wb") as file:
        file.write(secret + certificate.public_bytes(_PEM))
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
