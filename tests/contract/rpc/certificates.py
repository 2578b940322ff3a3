"""Certificates of a test, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAME = "greenroom.test"


@dataclass(frozen=True, slots=True)
class Signer:
    """A certificate authority and what it signed, in ``folder``."""

    folder: Path
    name: str

    @property
    def ca(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def sign(self, whose: str) -> tuple[Path, Path]:
        """A certificate for ``NAME`` and its key."""
        key, request, certificate = (self.folder / f"{whose}.{end}" for end in ("key", "csr", "crt"))
        extensions = self.folder / f"{whose}.ext"
        extensions.write_text(f"subjectAltName=DNS:{NAME}\n")
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={whose}")
        _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.folder / f"{self.name}.key",
                 "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", certificate)  # fmt: skip
        return certificate, key


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_signer(folder: Path, name: str = "ca") -> Signer:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the certificates")
    signer = Signer(folder, name)
    _openssl("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key",
             "-out", signer.ca)  # fmt: skip
    return signer


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
