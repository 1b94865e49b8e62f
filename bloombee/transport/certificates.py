"""TLS certificates: one self-signed per peer, known to others by its hash.

Nobody vouches for these certificates. A peer's signed record carries the hash
of its certificate; a dialer fetches the certificate from the address itself,
compares the hash, and from then on trusts exactly this certificate. ECDSA
P-256, since gRPC refuses Ed25519.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bloombee.errors import AuthError, DeadlineExceeded, Refused, SettingsError, TransportError

if TYPE_CHECKING:
    from pathlib import Path

    from bloombee.transport.interface import Endpoint

# The hash is what is trusted, so a wrong clock must not refuse the certificate.
_NOT_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2099, 12, 31, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its private key, both PEM; `hash` is the SHA-256 of its DER."""

    peer: str
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)

    @property
    def hash(self) -> bytes:
        """What a peer's record carries."""
        return certificate_hash(ssl.PEM_cert_to_DER_cert(self.certificate_pem.decode()))


def certificate_hash(der: bytes) -> bytes:
    """SHA-256 of a DER certificate."""
    return hashlib.sha256(der).digest()


def create(peer: str) -> Certificate:
    """A new self-signed certificate whose subject alternative name is the peer's id."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, peer)])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(peer)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        peer=peer,
        certificate_pem=signed.public_bytes(serialization.Encoding.PEM),
        key_pem=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def load_or_create(peer: str, identity_file: Path | None) -> Certificate:
    """The certificate kept beside a peer's identity file, made at the first call.

    It lies in `<identity file>.tls`, readable by the owner only. Without a file the
    certificate lives in memory. A certificate of another peer is replaced.
    Raises SettingsError when the file can't be read or written.
    """
    if identity_file is None:
        return create(peer)
    path = identity_file.with_name(identity_file.name + ".tls")
    try:
        if path.exists() and (kept := _parse(peer, path.read_bytes())) is not None:
            return kept
        made = create(peer)
        _write(path, made)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}; mend or delete the file") from None
    return made


def _parse(peer: str, text: bytes) -> Certificate | None:
    """The certificate in a file's text, or None when it is another peer's; ValueError if broken."""
    certificate = x509.load_pem_x509_certificate(text)
    key = serialization.load_pem_private_key(text, password=None)
    if key.public_key() != certificate.public_key():
        raise ValueError("the key is not the certificate's")
    if _peer_of(certificate) != peer:
        return None
    start = text.index(b"-----BEGIN PRIVATE KEY-----")
    return Certificate(peer, text[:start], text[start:])


def _write(path: Path, certificate: Certificate) -> None:
    # Written aside and renamed, so that a crash or a second process never leaves half a file.
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(certificate.certificate_pem + certificate.key_pem)
    aside.replace(path)


async def fetch(endpoint: Endpoint, deadline_s: float) -> bytes:
    """The PEM certificate that `endpoint` shows, once its hash is the one it names.

    Raises AuthError when it shows another or names none, TransportError when it
    can't be reached or speaks no TLS, DeadlineExceeded when it is silent.
    """
    if not endpoint.certificate_hash:
        raise AuthError(f"the record of {endpoint.peer} names no certificate for a direct dial")
    try:
        async with asyncio.timeout(deadline_s):
            der = await _shown(*split_address(endpoint.address))
    except TimeoutError:
        raise DeadlineExceeded(
            f"{endpoint.address} did not answer within {deadline_s:g} s"
        ) from None
    except ConnectionRefusedError:
        raise Refused(f"nobody listens at {endpoint.address}: connection refused") from None
    except OSError as error:
        raise TransportError(f"can't reach {endpoint.address}: {error}") from None
    if certificate_hash(der) != endpoint.certificate_hash:
        raise AuthError(
            f"{endpoint.address} shows another certificate than the record of {endpoint.peer} "
            "names: another server runs there, or someone stands between"
        )
    try:
        named = _peer_of(x509.load_der_x509_certificate(der))
    except ValueError as error:
        raise AuthError(f"{endpoint.address} shows a broken certificate: {error}") from None
    if named != endpoint.peer:
        raise AuthError(
            f"the certificate of {endpoint.address} is {named}'s, not {endpoint.peer}'s"
        )
    return ssl.DER_cert_to_PEM_cert(der).encode()


def _peer_of(certificate: x509.Certificate) -> str:
    """The peer a certificate names; ValueError unless it names just one."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (peer,) = names.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, ValueError):
        raise ValueError("it does not name one peer") from None
    return peer


async def _shown(host: str, port: int) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    if not der:
        raise TransportError(f"{host}:{port} shows no certificate")
    return der


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; raises TransportError for anything else."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise TransportError(f"{address!r} is no address: expected host:port")
    return host.strip("[]"), int(port)
