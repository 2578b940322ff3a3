"""What the first start makes: for each service what it needs to know the others by, and nothing else."""

from __future__ import annotations

import shutil
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.image import IMAGE, certificates

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed: it makes them")


@pytest.fixture
def made(identities: Path) -> Path:
    return identities


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def connect(server: Path, client: Path | None, name: str, ca: Path) -> None:
    """A handshake within the process. Raises ssl.SSLError where one side does not take the other."""
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
    serving.verify_mode = ssl.CERT_REQUIRED if client is not None else ssl.CERT_NONE
    calling = ssl.create_default_context(cafile=ca)
    for context, folder in ((serving, server), (calling, client)):
        if folder is not None:
            keystore = folder / "keystore.pem"
            pair = (keystore, keystore) if keystore.exists() else (folder / "certificate.pem", folder / "key.pem")
            context.load_cert_chain(*pair)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [calling.wrap_bio(back, there, server_hostname=name), serving.wrap_bio(there, back, server_side=True)]
    for _ in range(5):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_each_service_has_its_own_and_no_more(made: Path) -> None:
    found = {folder.name: sorted(path.name for path in folder.iterdir()) for folder in (made / "identities").iterdir()}
    certified = ["ca.pem", "certificate.pem", "kafka-password", "key.pem"]
    assert found == {
        "kafka": ["ca.pem", "keystore.pem"],
        "tasktype": ["ca.pem", "kafka-password"],
        **dict.fromkeys(["gateway", "scheduler", "predictor", "worker"], certified),
    }
    keys = {path.read_bytes() for path in made.rglob("key.pem")}
    assert len(keys) == 4


def test_nobody_else_reads_what_is_secret(made: Path) -> None:
    """Kafka's user and the broker read theirs by the group: their image has another user."""
    modes = {
        str(path.relative_to(made)): stat.S_IMODE(path.stat().st_mode) for path in made.rglob("*") if path.is_file()
    }
    by_group = {"kafka-user/password", "identities/kafka/keystore.pem"}
    for name, mode in modes.items():
        if name in by_group:
            assert mode == 0o640, name
        elif "key" in name or "password" in name:
            assert mode == 0o600, name


@pytest.mark.parametrize("called", ["worker", "predictor", "gateway"])
@pytest.mark.parametrize("calling", ["scheduler", "worker"])
def test_who_calls_and_who_is_called_know_each_other(made: Path, called: str, calling: str) -> None:
    identities = made / "identities"
    connect(identities / called, identities / calling, certificates.NAME, identities / called / "ca.pem")


def test_clients_know_the_broker(made: Path) -> None:
    identities = made / "identities"
    for name in ("kafka", "localhost"):
        connect(identities / "kafka", None, name, identities / "tasktype" / "ca.pem")


@pytest.mark.parametrize("calling", ["gateway", "predictor", "kafka"])
def test_who_is_only_called_can_not_call(made: Path, calling: str) -> None:
    identities = made / "identities"
    with pytest.raises(ssl.SSLError, match=r"(?i)purpose|unsuitable|unsupported certificate|verify failed"):
        connect(identities / "worker", identities / calling, certificates.NAME, identities / "worker" / "ca.pem")


@pytest.mark.parametrize(("called", "name"), [("scheduler", certificates.NAME), ("worker", "kafka")])
def test_nobody_passes_for_another(made: Path, called: str, name: str) -> None:
    identities = made / "identities"
    with pytest.raises(ssl.SSLError):
        connect(identities / called, identities / "worker", name, identities / "worker" / "ca.pem")


def test_a_second_time_nothing_changes(made: Path) -> None:
    before = contents(made)
    assert certificates.make(made) == []
    assert contents(made) == before


def test_what_ends_soon_is_renewed_and_still_known(tmp_path: Path) -> None:
    certificates.make(tmp_path, days=10, renew_days=3)
    old = contents(tmp_path)
    done = certificates.make(tmp_path)
    new = contents(tmp_path)
    changed = {name.split("/")[1] for name in new if new[name] != old[name]}
    assert changed == {"kafka", "gateway", "scheduler", "predictor", "worker"}
    assert len(done) == 5
    assert new["authority/ca.pem"] == old["authority/ca.pem"]
    identities = tmp_path / "identities"
    connect(identities / "worker", identities / "scheduler", certificates.NAME, identities / "worker" / "ca.pem")


def test_half_of_a_pair_is_made_anew(tmp_path: Path) -> None:
    """As a machine leaves it that goes down between the two files."""
    certificates.make(tmp_path)
    worker, scheduler = (tmp_path / "identities" / name for name in ("worker", "scheduler"))
    shutil.copy(scheduler / "key.pem", worker / "key.pem")
    assert [what.partition(",")[0] for what in certificates.make(tmp_path)] == ["a certificate for worker"]
    connect(worker, scheduler, certificates.NAME, worker / "ca.pem")


def test_a_damaged_key_is_made_anew(tmp_path: Path) -> None:
    certificates.make(tmp_path)
    worker, scheduler = (tmp_path / "identities" / name for name in ("worker", "scheduler"))
    (worker / "key.pem").write_text("")
    assert [what.partition(",")[0] for what in certificates.make(tmp_path)] == ["a certificate for worker"]
    connect(worker, scheduler, certificates.NAME, worker / "ca.pem")


def test_anew_is_all_of_it(tmp_path: Path) -> None:
    certificates.make(tmp_path)
    before = contents(tmp_path)
    certificates.make(tmp_path, anew=True)
    after = contents(tmp_path)
    assert all(after[name] != before[name] for name in before)


def test_a_folder_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "authority").write_text("a file")
    command = [sys.executable, "-I", str(IMAGE / "certificates.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "does the folder belong to this user?" in done.stderr
    assert "Traceback" not in done.stderr
