from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, PackError
from greenroom.experts import file_lock
from greenroom.experts.pack import PackFile, PackWriter
from greenroom.moe import packing
from greenroom.moe.checkpoint import resolve
from greenroom.moe.conversion import ExpertPlan
from greenroom.moe.packing import default_cache_dir, ensure_pack
from tests.random_checkpoints import save_random


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def pack(folder: Path, cache: Path, dtype: str = "auto", **options: Any) -> Path:
    return ensure_pack(resolve(str(folder)), dtype, cache, **options)


def change_an_expert(folder: Path) -> None:
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        for name in tensors:
            if "experts" in name:
                tensors[name][0, 0] += 1
                save_file(tensors, shard, metadata={"format": "pt"})
                return


@contextmanager
def forbidden(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(packing, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
        yield


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.joinpath("packs").glob("*")] + [
        path.name for path in cache.joinpath("packs").glob(".*")
    ]


def test_another_start_reads_nothing(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pack(folder, cache)
    with forbidden(monkeypatch, "_write", "_digest", "ShardReader"):
        assert pack(folder, cache) == path
    assert leftovers(cache) == [path.name]


def test_the_weights_are_read_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ExpertPlan(resolve(str(folder)), torch.bfloat16)
    read: list[int] = []
    original = os.preadv

    def preadv(*arguments: Any) -> int:
        read.append(original(*arguments))
        return read[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    pack(folder, cache)
    assert sum(read) >= sum(stored.nbytes for stored in plan.stored)
    read_by_pack_itself = 3 * 4096  # opening it to see that it is whole
    assert sum(read) <= sum(stored.nbytes for stored in plan.stored) + read_by_pack_itself


def test_a_copy_elsewhere_finds_the_same_pack(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(folder, cache)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    with forbidden(monkeypatch, "_write"):
        assert pack(copy, cache) == path
    assert len(list(cache.joinpath("digests").iterdir())) == 2


def test_another_sharding_finds_the_same_pack(cache: Path, tmp_path: Path) -> None:
    few = save_random("qwen3_moe", tmp_path / "few", max_shard_size="1GB")
    many = save_random("qwen3_moe", tmp_path / "many", max_shard_size="20KB")
    assert pack(few, cache) == pack(many, cache)


def test_a_changed_file_gives_another_pack(folder: Path, cache: Path) -> None:
    before = pack(folder, cache)
    change_an_expert(folder)
    after = pack(folder, cache)
    assert before != after
    assert before.exists()
    for path in (before, after):
        PackFile.open(path).verify()


def test_dense_weights_do_not_matter(folder: Path, cache: Path) -> None:
    before = pack(folder, cache)
    shard = next(path for path in folder.glob("*.safetensors") if "lm_head.weight" in load_file(path))
    tensors = load_file(shard)
    tensors["lm_head.weight"] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    assert pack(folder, cache) == before


def test_each_dtype_has_its_pack(folder: Path, cache: Path) -> None:
    paths = {dtype: pack(folder, cache, dtype) for dtype in ("auto", "bfloat16", "float32", "float16")}
    assert paths["auto"] == paths["bfloat16"]
    assert len(set(paths.values())) == 3
    for dtype, path in paths.items():
        manifest = PackFile.open(path).manifest
        assert dtype in ("auto", manifest.dtype)
        assert {spec.dtype for layer in manifest.layers for spec in layer.layout.tensors} == {manifest.dtype}


def test_an_unknown_dtype_is_refused(folder: Path, cache: Path) -> None:
    with pytest.raises(InvalidConfig, match="dtype: 'int4' is not allowed; use auto or one of bfloat16, "):
        pack(folder, cache, "int4")


def test_a_truncated_pack_is_refused_until_forced(folder: Path, cache: Path) -> None:
    path = pack(folder, cache)
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 5000)
    with pytest.raises(PackError, match="truncated or altered; make it anew with `greenroom pack --force"):
        pack(folder, cache)
    assert pack(folder, cache, force=True) == path
    assert path.read_bytes() == whole


def test_the_pack_of_another_model_is_refused(folder: Path, cache: Path, tmp_path: Path) -> None:
    path = pack(folder, cache)
    other = pack(save_random("olmoe", tmp_path / "olmoe"), tmp_path / "other")
    shutil.copy(other, path)
    with pytest.raises(PackError, match=r"pack of another model: model_type is 'olmoe', not 'mixtral'"):
        pack(folder, cache)


def test_a_pack_that_was_deleted_is_made_again(folder: Path, cache: Path) -> None:
    path = pack(folder, cache)
    whole = path.read_bytes()
    path.unlink()
    assert pack(folder, cache) == path
    assert path.read_bytes() == whole


def test_a_spoiled_memory_of_the_digest_is_forgotten(folder: Path, cache: Path) -> None:
    path = pack(folder, cache)
    (memory,) = cache.joinpath("digests").iterdir()
    memory.write_text("not json")
    assert pack(folder, cache) == path


def test_a_checkpoint_that_changes_while_it_is_packed_is_refused(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PackWriter.write
    changed: list[bool] = []

    def write(self: PackWriter, *arguments: Any) -> None:
        original(self, *arguments)
        if not changed:
            changed.append(True)
            os.utime(next(folder.glob("*.safetensors")), ns=(0, 0))

    monkeypatch.setattr(PackWriter, "write", write)
    with pytest.raises(CorruptCheckpoint, match="was changed while it was read"):
        pack(folder, cache)
    assert leftovers(cache) == []


def test_a_disk_that_is_too_small_is_found_out_first(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(folder)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with (
        forbidden(monkeypatch, "ShardReader"),
        pytest.raises(PackError, match=r"it takes .* KiB and .*packs has 97\.7 KiB free.*GREENROOM_CACHE"),
    ):
        pack(folder, cache)
    assert leftovers(cache) == []


def test_a_full_disk_leaves_nothing_behind(folder: Path, cache: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, limit[1]))
        with pytest.raises(PackError, match="no room for the expert pack"):
            pack(folder, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert leftovers(cache) == []
    PackFile.open(pack(folder, cache)).verify()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system here; the limit of file sizes stands in for it")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_fills_up_meanwhile(folder: Path, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: roomy)  # there was room when it was asked for
    with pytest.raises(PackError, match=r"No space left on device"):
        pack(folder, tiny_disk / "cache")
    assert leftovers(tiny_disk / "cache") == []


class Killed(BaseException):
    pass


def test_an_interrupted_packing_leaves_nothing_behind(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PackWriter.write

    def write(self: PackWriter, layer: int, expert: int, tensors: Any) -> None:
        if (layer, expert) == (1, 4):
            raise Killed
        original(self, layer, expert, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(PackWriter, "write", write)
        with pytest.raises(Killed):
            pack(folder, cache)
    assert leftovers(cache) == []
    PackFile.open(pack(folder, cache)).verify()


def test_two_threads_make_it_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    original = packing._write

    def write(plan: ExpertPlan, cache: Path, progress: bool | None) -> str:
        written.append(folder)
        return original(plan, cache, progress)

    monkeypatch.setattr(packing, "_write", write)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pack(folder, cache))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert len(set(found)) == len(written) == 1


PACK = """
import sys
from pathlib import Path
from greenroom.moe import packing
from greenroom.moe.checkpoint import resolve

original = packing._write

def write(*arguments):
    print("writing", flush=True)
    sys.stdin.readline()
    return original(*arguments)

packing._write = write
print(packing.ensure_pack(resolve(sys.argv[1]), cache_dir=Path(sys.argv[2])))
"""


def test_two_processes_make_it_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PACK, str(folder), str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    refused = threading.Event()
    original = file_lock._try_lock

    def try_lock(fd: int) -> bool:
        got = original(fd)
        if not got:
            refused.set()
        return got

    monkeypatch.setattr(file_lock, "_try_lock", try_lock)
    found: list[Path] = []
    with forbidden(monkeypatch, "_write", "_digest"):
        thread = threading.Thread(target=lambda: found.append(pack(folder, cache)))
        thread.start()
        assert refused.wait(60), "this process waits for the other"
        assert not list(cache.rglob("*.pack"))
        out, err = child.communicate("go on\n", timeout=60)
        thread.join(60)
    assert child.returncode == 0, err
    assert found == [Path(out.strip())]
    assert "packing" not in err, "no bar where there is no terminal"
    PackFile.open(found[0]).verify()


def test_waiting_for_another_process_has_an_end(folder: Path, cache: Path) -> None:
    checkpoint = resolve(str(folder))
    lock = cache / "locks" / packing._identity(ExpertPlan(checkpoint, torch.bfloat16))
    lock.parent.mkdir(parents=True)
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # a lock belongs to the open file, so this is as good as another process's
        with pytest.raises(PackError, match="another packing of this model has not ended"):
            ensure_pack(checkpoint, cache_dir=cache, lock_wait_s=0.3)
    assert ensure_pack(checkpoint, cache_dir=cache, lock_wait_s=0.3).exists()


def test_waiting_for_another_thread_has_an_end(folder: Path, cache: Path) -> None:
    with packing._PACKING, pytest.raises(PackError, match="another packing of this model has not ended"):
        pack(folder, cache, lock_wait_s=0.1)


def test_progress_goes_to_stderr(folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(folder, cache, progress=True)
    shown = capsys.readouterr()
    assert "packing experts: 100%" in shown.err
    assert shown.out == ""


def test_where_packs_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GREENROOM_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("GREENROOM_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "greenroom"
