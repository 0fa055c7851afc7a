"""A certificate authority for tests of TLS: it issues certificates with any ends, in some milliseconds each."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
KEY_USAGE_OF_CA = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class TestAuthority:
    """Its own certificate is in `ca`; `issue` writes NAME.pem and NAME.key into `folder`."""

    __test__ = False

    def __init__(self, folder: Path, name: str = "ca", ends_in: timedelta = 1_000 * DAY) -> None:
        self.folder, self.ca = folder, folder / f"{name}.pem"
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _named(name)
        made = self._make(self._name, self._key, ends_in, is_ca=True)
        self.ca.write_bytes(made.public_bytes(Encoding.PEM))

    def issue(self, name: str, ends_in: timedelta = 2 * DAY) -> tuple[Path, Path]:
        """The files of a new certificate and its key, for NAME at localhost; a negative `ends_in`: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._make(_named(name), key, ends_in, is_ca=False)
        files = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        files[0].write_bytes(made.public_bytes(Encoding.PEM))
        files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        files[1].chmod(0o600)
        return files

    def _make(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, ends_in: timedelta, *, is_ca: bool
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, now + ends_in) - DAY)
            .not_valid_after(now + ends_in)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if is_ca:  # Python 3.13 asks for it
            builder = builder.add_extension(KEY_USAGE_OF_CA, critical=True)
        else:
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
