"""Real certificates for tests: an authority, and what it signs."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC)


class Authority:
    """Signs certificates; its own is FOLDER/NAME.pem."""

    def __init__(self, folder, name="ca"):
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        ca = x509.BasicConstraints(ca=True, path_length=0)
        made = _builder(self.name, self.name, self.key, (-DAY, 30 * DAY)).add_extension(ca, critical=True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self.certificate = made.add_extension(usage, critical=True).sign(self.key, hashes.SHA256())
        self.path = str(folder / f"{name}.pem")
        (folder / f"{name}.pem").write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, name, *hosts, valid=(-DAY, 30 * DAY), client=False):
        """(certificate, key) as paths; `hosts` stand in it."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        purpose = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        made = _builder(subject, self.name, key, valid)
        made = made.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        if hosts:
            made = made.add_extension(x509.SubjectAlternativeName([_name(h) for h in hosts]), critical=False)
        certificate = made.sign(self.key, hashes.SHA256())
        (self.folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (self.folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")


def _builder(subject, issuer, key, valid):
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + valid[0])
        .not_valid_after(NOW + valid[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(host):
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
