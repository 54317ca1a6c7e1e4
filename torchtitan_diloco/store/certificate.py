"""A self-signed certificate for a server, whose hash is in its join files."""

import hashlib
import ipaddress
import ssl
from datetime import datetime

from torchtitan_diloco.base.user import UserError, install_command

NAME = "torchtitan-diloco"
FIRST_DAY = datetime(2020, 1, 1)
LAST_DAY = datetime(2120, 1, 1)
"""Clients with a join file ignore both days, because clocks of sites differ."""


def make_certificate(
    first: datetime = FIRST_DAY, last: datetime = LAST_DAY, address: str = "127.0.0.1"
) -> tuple[bytes, bytes]:
    """Return a new certificate and its key, as PEM.

    `address`: address of a host. Only clients that trust the certificate without a join file
    check it.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UserError(f"install cryptography: {install_command('islands')}") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    host = x509.IPAddress(ipaddress.ip_address(address))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(first)
        .not_valid_after(last)
        .add_extension(x509.SubjectAlternativeName([host]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return certificate.public_bytes(pem), key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate in PEM, in hexadecimal."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).hexdigest()
