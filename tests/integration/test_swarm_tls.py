"""TLS and mutual TLS as the transport offers them, with certificates made here."""

from __future__ import annotations

import datetime
from pathlib import Path

import swarm_kit as kit
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from swarm_processes import free_port

from coterie.swarm.network import NetworkExchange
from coterie.swarm.relay import Relay
from coterie.swarm.zenoh_config import Security


class Authority:
    """Signs certificates for ``localhost`` into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        made = self._builder(self.name, self.key).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        self.file.write_bytes(made.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(self, name: str) -> tuple[str, str]:
        """(certificate file, key file)."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(subject, key).add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost")]), False
        )
        cert, secret = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert.write_bytes(made.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM))
        secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return str(cert), str(secret)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )


def link(where: str, number: int, security: Security) -> str:
    node = NetworkExchange("swarm", kit.person(number), (where,), security=security, wait_s=0.7)
    found = node.status().link
    node.close()
    return found


def test_only_relays_and_nodes_with_the_right_certificates_are_accepted(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    where = f"tls/localhost:{free_port()}"
    server, key = ours.issue("relay")
    good, good_key = ours.issue("node")
    bad, bad_key = other.issue("stranger")
    ca = str(ours.file)
    with Relay((where,), security=Security(ca=ca, certificate=server, key=key, mutual=True)):
        assert link(where, 1, Security(ca=ca, certificate=good, key=good_key, mutual=True)) == "up"
        assert link(where, 2, Security(ca=ca, certificate=bad, key=bad_key, mutual=True)) == "down"
        assert link(where, 3, Security(ca=ca)) == "down"  # no certificate of its own
        assert link(where, 4, Security(ca=str(other.file), certificate=good, key=good_key, mutual=True)) == "down"


def test_a_server_certificate_alone_serves_an_open_swarm(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    where = f"tls/localhost:{free_port()}"
    server, key = ours.issue("relay")
    with Relay((where,), security=Security(certificate=server, key=key)):
        assert link(where, 1, Security(ca=str(ours.file))) == "up"
        assert link(where, 2, Security(ca=str(other.file))) == "down"
