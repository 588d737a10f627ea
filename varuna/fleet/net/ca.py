"""The run's own certificate authority: one key that everyone who joins can recognise by its fingerprint.

The manager's certificate names a fixed DNS name, not an address, so it stays valid whatever the manager's
address is. Clients ask TLS for that name and trust this authority alone.
"""

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from varuna.core.errors import FleetError

SERVER_NAME = "manager.varuna.internal"
"""The name in the manager's certificate, and what clients ask for."""

_AUTHORITY_LIFE = datetime.timedelta(days=3650)
_SERVER_LIFE = datetime.timedelta(days=365)
_BACKDATED = datetime.timedelta(days=1)  # a machine whose clock is a few hours behind may still join


@dataclass(frozen=True)
class CertificateAuthority:
    """A CA on disk, with the manager's certificate beside it."""

    certificate_pem: str
    server_pem: Path
    """Key and certificate of the manager, for its TLS context."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the CA certificate (DER), in hex."""
        return fingerprint(self.certificate_pem)

    def server_context(self) -> ssl.SSLContext:
        """Return the context with which the manager listens: TLS 1.3 and nothing older."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.server_pem)
        return context


def fingerprint(certificate_pem: str) -> str:
    """SHA-256 of a certificate (DER), in hex.

    Raises:
        FleetError: it is not a certificate.
    """
    return hashlib.sha256(_der(certificate_pem)).hexdigest()


def alone(certificate_pem: str) -> str:
    """The one certificate that ``fingerprint`` is of, and nothing else that the text has.

    A text may hold several certificates, and TLS would trust each of them: whoever compares a fingerprint must go on
    with this, never with the text.

    Raises:
        FleetError: it is not a certificate.
    """
    return ssl.DER_cert_to_PEM_cert(_der(certificate_pem))


def _der(certificate_pem: str) -> bytes:
    try:
        return ssl.PEM_cert_to_DER_cert(certificate_pem.strip())
    except ValueError as error:
        raise FleetError(
            "the answer is not a certificate: is this address a Varuna manager? Compare it with the JOIN string "
            "that `varuna manager` printed."
        ) from error


def client_context(certificate_pem: str) -> ssl.SSLContext:
    """Trust this authority alone; connect with ``server_hostname=SERVER_NAME``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=alone(certificate_pem))
    return context


def unverified_context() -> ssl.SSLContext:
    """A context that only fetches the CA certificate, which is compared with a known fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def open_authority(folder: Path) -> CertificateAuthority:
    """The CA in ``folder``, made there if there is none; the manager's certificate is issued anew each time.

    So a manager that is started again never comes with an expired one, and agents need not be told.

    Raises:
        FleetError: what lies there cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key_path, certificate_path, server_pem = folder / "ca-key.pem", folder / "ca.pem", folder / "server.pem"
    if not certificate_path.exists():
        _make(key_path, certificate_path)
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(
            f"the certificate authority in {folder} cannot be read ({error}). Restore it, or remove the folder: "
            f"agents then have to join again."
        ) from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    issue(key, certificate, server_pem)
    return CertificateAuthority(certificate_path.read_text(), server_pem)


def _make(key_path: Path, certificate_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Varuna run")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private(key_path, _key_pem(key))
    write_private(certificate_path, certificate.public_bytes(serialization.Encoding.PEM))


def issue(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    path: Path,
    *,
    life: datetime.timedelta = _SERVER_LIFE,
) -> None:
    """Write a new key and certificate for the manager to ``path``; ``life`` counts from now."""
    own = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Varuna manager")]))
        .issuer_name(authority.subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(min(now + life, authority.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private(path, _key_pem(own) + certificate.public_bytes(serialization.Encoding.PEM))


def make_private(*folders: Path) -> None:
    """Folders that only their owner may look into; one that is there already keeps the rights that it has.

    Raises:
        OSError: one cannot be made.
    """
    for folder in folders:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that nobody else may read, whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
