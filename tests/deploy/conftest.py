from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.deploy.image import certificates


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first start of Compose makes, for tests that leave it as it is."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the certificates")
    folder = tmp_path_factory.mktemp("certificates")
    certificates.make(folder)
    return folder
