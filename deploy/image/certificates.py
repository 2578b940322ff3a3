"""Makes what the services of one cluster know each other by: a certificate authority, certificates, Kafka's password.

    python certificates.py FOLDER              # makes what is missing, renews what ends soon, leaves the rest
    python certificates.py FOLDER --anew       # makes all of it anew

    FOLDER/authority/           the authority's key and certificate: for nobody but this program
    FOLDER/identities/SERVICE/  what SERVICE is given: ca.pem, certificate.pem, key.pem, kafka-password; kafka has its
                                certificate and key in one keystore.pem
    FOLDER/kafka-user/password  for whoever tells the broker of its user

A certificate is for one direction, or for both: a gateway is called and calls nobody, so its certificate opens no
worker. All who are called have the name NAME in theirs, since their addresses are not known yet. Services read the
files when they start. Needs `openssl`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAME = "rpc.greenroom.internal"
AUTHORITY_DAYS = 3650
DAYS = 825
RENEW_DAYS = 275
"""So long before its end a certificate is renewed: a third of its time."""
_DAY_S = 86400
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Service:
    """``names``: as subjectAltName has them; none for who is not called. ``uses``: serverAuth to be called,
    clientAuth to call; none for who has no certificate. ``keystore``: key and certificate in one file, which the
    service reads by its group."""

    name: str
    uses: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    password: bool = True
    keystore: bool = False


SERVICES = (
    Service("kafka", ("serverAuth",), ("DNS:kafka", "DNS:localhost", "IP:127.0.0.1"), password=False, keystore=True),
    Service("gateway", ("serverAuth",), (f"DNS:{NAME}",)),
    Service("tasktype"),
    Service("scheduler", ("clientAuth",)),
    Service("predictor", ("serverAuth",), (f"DNS:{NAME}",)),
    Service("worker", ("serverAuth", "clientAuth"), (f"DNS:{NAME}",)),
)


def make(folder: Path, *, anew: bool = False, days: int = DAYS, renew_days: int = RENEW_DAYS) -> list[str]:
    """What was made, for people; nothing where all of it was there. Raises CalledProcessError where openssl refuses,
    and OSError where ``folder`` can not be written."""
    done = []
    authority = folder / "authority"
    authority.mkdir(parents=True, exist_ok=True)
    if anew or not _good(authority / "ca.pem", authority / "ca.key", authority / "ca.pem", renew_days):
        _make_authority(authority)
        done.append(f"a certificate authority, until {_end(authority / 'ca.pem')}")
    password = folder / "kafka-user" / "password"
    if anew or not password.exists():
        _put(password, secrets.token_urlsafe(32), mode=0o640)
        done.append("a password for Kafka")
    for service in SERVICES:
        mine = folder / "identities" / service.name
        _put(mine / "ca.pem", (authority / "ca.pem").read_text(), mode=0o644)
        if service.password:
            _put(mine / "kafka-password", password.read_text(), mode=0o600)
        if not service.uses:
            continue
        certificate, key = (mine / name for name in ("certificate.pem", "key.pem"))
        if service.keystore:
            certificate = key = mine / "keystore.pem"
        if not _good(certificate, key, authority / "ca.pem", renew_days):
            _make_certificate(authority, service, certificate, key, days)
            done.append(f"a certificate for {service.name}, until {_end(certificate)}")
    return done


def _make_authority(folder: Path) -> None:
    extensions = (
        "basicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign\nsubjectKeyIdentifier=hash\n"
    )
    with _configured(extensions) as (scratch, configuration):
        key, certificate = scratch / "key", scratch / "certificate"
        _openssl("req", "-x509", *_NEW_KEY, "-config", configuration, "-extensions", "asked", "-days", AUTHORITY_DAYS,
                 "-subj", "/CN=greenroom", "-keyout", key, "-out", certificate)  # fmt: skip
        _put(folder / "ca.key", key.read_text(), mode=0o600)
        _put(folder / "ca.pem", certificate.read_text(), mode=0o644)


def _make_certificate(authority: Path, service: Service, certificate: Path, key: Path, days: int) -> None:
    extensions = "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nsubjectKeyIdentifier=hash\n"
    extensions += f"authorityKeyIdentifier=keyid\nextendedKeyUsage={','.join(service.uses)}\n"
    if service.names:
        extensions += f"subjectAltName={','.join(service.names)}\n"
    with _configured(extensions) as (scratch, configuration):
        request, made_key, made = scratch / "request", scratch / "key", scratch / "certificate"
        _openssl("req", "-new", *_NEW_KEY, "-config", configuration, "-subj", f"/CN={service.name}",
                 "-keyout", made_key, "-out", request)  # fmt: skip
        _openssl("x509", "-req", "-in", request, "-CA", authority / "ca.pem", "-CAkey", authority / "ca.key",
                 "-set_serial", f"0x{secrets.token_hex(16)}", "-days", days, "-extfile", configuration,
                 "-extensions", "asked", "-out", made)  # fmt: skip
        if certificate == key:
            _put(key, made_key.read_text() + made.read_text(), mode=0o640)
            return
        _put(key, made_key.read_text(), mode=0o600)
        _put(certificate, made.read_text(), mode=0o644)


@contextmanager
def _configured(extensions: str) -> Iterator[tuple[Path, Path]]:
    """A folder that goes again, and openssl's configuration in it: the machine's own is of no account."""
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder, "configuration")
        configuration.write_text(f"[req]\ndistinguished_name=name\n[name]\n[asked]\n{extensions}")
        yield Path(folder), configuration


def _good(certificate: Path, key: Path, ca: Path, renew_days: int) -> bool:
    """Whether all three are there, belong together and hold for longer than ``renew_days``."""
    if not (certificate.exists() and key.exists() and ca.exists()):
        return False
    if not _holds("verify", "-CAfile", ca, certificate):
        return False
    if not _holds("x509", "-in", certificate, "-noout", "-checkend", renew_days * _DAY_S):
        return False
    if not _holds("pkey", "-in", key, "-noout"):
        return False
    mine = _openssl("pkey", "-in", key, "-pubout")
    return mine == _openssl("x509", "-in", certificate, "-noout", "-pubkey")


def _end(certificate: Path) -> str:
    return _openssl("x509", "-in", certificate, "-noout", "-enddate").partition("=")[2].strip()


def _holds(*arguments: str | int | Path) -> bool:
    command = ["openssl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def _openssl(*arguments: str | int | Path) -> str:
    command = ["openssl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def _put(path: Path, text: str, *, mode: int) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text() == text:
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    partial.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where they are, or will be")
    parser.add_argument("--anew", action="store_true", help="make all of it anew, the authority too")
    parser.add_argument("--days", type=int, default=DAYS, help=f"that a service's certificate holds ({DAYS})")
    arguments = parser.parse_args()
    try:
        done = make(arguments.folder, anew=arguments.anew, days=arguments.days, renew_days=arguments.days // 3)
    except OSError as error:
        sys.stderr.write(f"certificates: {error}; does the folder belong to this user?\n")
        return 1
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"certificates: {' '.join(error.cmd[:2])} ended with {error.returncode}: {error.stderr}\n")
        return 1
    sys.stdout.write("".join(f"made {what}\n" for what in done) or "all certificates are there\n")
    if done:
        sys.stdout.write("services that run take them when they start again\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
