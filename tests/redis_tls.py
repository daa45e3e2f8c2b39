"""Redis servers that speak TLS themselves, and certificates for them."""

import datetime
import ipaddress
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.embedded.process import LOOPBACK
from tests.requirements import lacking

PROGRAMS = ("redis-server", "valkey-server", "redis-check-rdb", "valkey-check-rdb")
"""Under the last two names Debian's redis-tools has the same program: it is what it is called."""
TLS_SETTING = b"tls-ca-cert-file"
"""A program that was built without TLS does not know it."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """One for 127.0.0.1 that is its own authority."""

    public: Path
    private: Path

    @property
    def settings(self) -> dict[str, str]:
        """For a server that uses TLS towards clients and other servers, beside its plain port."""
        return {
            "tls-cert-file": str(self.public),
            "tls-key-file": str(self.private),
            "tls-ca-cert-file": str(self.public),
            "tls-auth-clients": "optional",
            "tls-replication": "yes",
        }

    @property
    def options(self) -> str:
        """What a URL says to trust it."""
        return f"ssl_ca_certs={quote(str(self.public))}"


def self_signed(folder: Path) -> Certificate:
    """Makes the files ``redis.crt`` and ``redis.key``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "redis of a test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    found = Certificate(folder / "redis.crt", folder / "redis.key")
    found.public.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    found.private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return found


@contextmanager
def servers_with_tls(folder: Path) -> Iterator[None]:
    """Meanwhile the servers that are started are of a program with TLS.

    Skips the test if the machine has none. It is put on the PATH for as long only: which program
    the other tests run on is not for these to say.
    """
    for name in PROGRAMS:
        path = shutil.which(name)
        if path is not None and TLS_SETTING in Path(path).read_bytes():
            break
    else:
        lacking(
            "redis-tls",
            "no Redis or Valkey with TLS is installed (Debian: apt-get install redis-tools)",
        )
    (folder / "redis-server").symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=":")
        yield
