from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from greenroom.checkpoints import pack_cache
from greenroom.checkpoints.pack_cache import PackSource, default_cache_dir
from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, PackDamaged, PackError
from greenroom.experts.pack.pack_file import PackFile, PackWriter
from greenroom.moe.loading import packing
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import MoePackSource, ensure_pack
from tests.random_checkpoints import save_random
from tests.unit.experts.refused_locks import first_refusal
from tests.unit.moe_loading.privileges import permissions_count


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
            module = packing if name == "ShardReader" else pack_cache
            patch.setattr(module, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
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


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "gpt_oss", "switch_transformers"])
def test_weights_put_together_are_those_that_are_made(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random(family, tmp_path / "model", dtype=torch.bfloat16)
    joined = pack(folder, tmp_path / "joined")
    monkeypatch.setattr(ExpertPlan, "joins", lambda *_: False)
    assert pack(folder, tmp_path / "made").read_bytes() == joined.read_bytes()


def test_an_expert_that_is_stored_in_another_dtype_is_converted(cache: Path, tmp_path: Path) -> None:
    folder = save_random("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    before = pack(folder, cache)
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        own = {name: tensor.float() for name, tensor in tensors.items() if ".1.mlp.experts.3.down_proj" in name}
        save_file(tensors | own, shard, metadata={"format": "pt"})
    after = pack(folder, cache)
    assert after != before
    one, other = PackFile.open(before), PackFile.open(after)
    assert list(one._checksums) == list(other._checksums)


def test_an_unknown_dtype_is_refused(folder: Path, cache: Path) -> None:
    with pytest.raises(InvalidConfig, match="dtype: 'int4' is not allowed; use auto or one of bfloat16, "):
        pack(folder, cache, "int4")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5000)


def zero_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(4096))


def alter_a_record(path: Path) -> None:
    """Nothing of it shows until the record is read, which is what a start after that is told of."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackDamaged, match="was altered; make it anew"):
        PackFile.open(path).verify()


@pytest.mark.parametrize("damage", [truncate, zero_header, alter_a_record])
def test_a_damaged_pack_is_made_anew(
    folder: Path, cache: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = pack(folder, cache)
    whole = path.read_bytes()
    damage(path)
    assert pack(folder, cache) == path
    assert path.read_bytes() == whole
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == [f"the expert pack {path} is damaged; it is made anew"]
    assert leftovers(cache) == [path.name]
    with pytest.MonkeyPatch.context() as patch, forbidden(patch, "_write", "_digest"):
        pack(folder, cache)


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


def replaced(shard: Path) -> None:
    """As by a download of a newer revision: the tensors are the same ones, at other places."""
    tensors = load_file(shard)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].float()}, shard.with_name("new"), metadata={"format": "pt"})
    shard.with_name("new").rename(shard)


def written_into(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")


@pytest.mark.parametrize("change", [replaced, written_into])
@pytest.mark.parametrize("part", ["experts", "lm_head"])
def test_a_checkpoint_that_changes_since_it_was_resolved_is_refused(
    folder: Path, cache: Path, part: str, change: Callable[[Path], None]
) -> None:
    """Its headers were read then, and say where its tensors lay."""
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        os.utime(shard, ns=(0, 0))  # times are coarse, and this one is to differ from that of the change
    checkpoint = resolve(str(folder))
    change(next(shard for shard in shards if any(part in name for name in load_file(shard))))
    with pytest.raises(CorruptCheckpoint, match=r"model-.*\.safetensors was changed while it was read; start again"):
        (ensure_pack(checkpoint, cache_dir=cache) if part == "experts" else load(checkpoint))
    assert leftovers(cache) == []
    assert not list(cache.glob("digests/*")), "the next start is to read the weights"


def test_a_disk_that_is_too_small_is_found_out_first(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(folder)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with (
        forbidden(monkeypatch, "ShardReader"),
        pytest.raises(
            PackError, match=r"it takes .* KiB and .*packs has 97\.7 KiB free.*--cache-dir or GREENROOM_CACHE"
        ),
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


@pytest.mark.parametrize("known", [False, True])
def test_a_disk_without_room_for_the_digest(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    """The pack took the last of it. It is served all the same."""
    found = pack(folder, cache) if known else None
    shutil.rmtree(cache / "digests", ignore_errors=True)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pack_cache, "write_whole", full)
    path = pack(folder, cache)
    assert found in (None, path)
    PackFile.open(path).verify()
    assert "the weights were read to know that" in caplog.text


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
    original = pack_cache._write

    def write(source: PackSource, cache: Path, progress: bool | None) -> str:
        written.append(folder)
        return original(source, cache, progress)

    monkeypatch.setattr(pack_cache, "_write", write)
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
from greenroom.checkpoints import pack_cache
from greenroom.moe.loading import packing
from greenroom.moe.loading.checkpoint import resolve

original = pack_cache._write

def write(*arguments):
    print("writing", flush=True)
    sys.stdin.readline()
    return original(*arguments)

pack_cache._write = write
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
    refused = first_refusal(monkeypatch)
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
    lock = cache / "locks" / pack_cache._identity(MoePackSource(ExpertPlan(checkpoint, torch.bfloat16)))
    lock.parent.mkdir(parents=True)
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # a lock belongs to the open file, so this is as good as another process's
        with pytest.raises(PackError, match="another packing of this model has not ended"):
            ensure_pack(checkpoint, cache_dir=cache, lock_wait_s=0.3)
    assert ensure_pack(checkpoint, cache_dir=cache, lock_wait_s=0.3).exists()


def test_waiting_for_another_thread_has_an_end(folder: Path, cache: Path) -> None:
    with pack_cache._PACKING, pytest.raises(PackError, match="another packing of this model has not ended"):
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


@pytest.fixture
def read_only(cache: Path) -> Iterator[Callable[[], None]]:
    """Makes the cache read-only, as a mounted volume or the layer of an image is."""
    mounted: list[Path] = []

    def mount() -> None:
        for options in (["--bind", str(cache)], ["-o", "remount,bind,ro"]):
            command = ["mount", *options, str(cache)]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("no right to mount a folder here; permissions stand in for it")
            mounted.append(cache)

    yield mount
    if mounted:
        subprocess.run(["umount", str(cache)], check=True)


def forbid_writing(cache: Path) -> None:
    for path in [cache, *cache.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_a_pack_in_a_read_only_file_system_is_found(
    folder: Path, cache: Path, read_only: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(folder, cache)
    shutil.rmtree(cache / "locks")
    read_only()
    with forbidden(monkeypatch, "_write", "_digest", "ShardReader"):
        assert pack(folder, cache) == path
    with pytest.raises(PackError, match=r"has no pack of .* and can not be written to; make it .*GREENROOM_CACHE"):
        pack(folder, cache, "float32")


def test_a_pack_in_a_cache_that_may_not_be_written_to_is_found(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(folder, cache)
    forbid_writing(cache)
    with permissions_count():
        with forbidden(monkeypatch, "_write", "_digest", "ShardReader"):
            assert pack(folder, cache) == path
        with pytest.raises(PackError, match=r"has no pack of .* and can not be written to; make it .*GREENROOM_CACHE"):
            pack(folder, cache, "float32")


@pytest.mark.parametrize("part", [".", "digests", "locks"])
def test_a_read_only_cache_that_came_with_another_copy_of_the_weights(
    folder: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """As a layer of an image: its files have other numbers, and times, than those that were packed."""
    path = pack(folder, cache)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    forbid_writing(cache / part)
    with permissions_count():
        assert pack(copy, cache) == path
    assert "the weights were read to know that" in caplog.text


@pytest.mark.parametrize("mode", [0, 0o100])
def test_a_cache_that_may_not_be_read_is_told(folder: Path, cache: Path, mode: int) -> None:
    pack(folder, cache)
    (cache / "packs").chmod(mode)
    (cache / "digests").chmod(0)
    with (
        permissions_count(),
        pytest.raises(PackError, match=r"Permission denied \(.*choose another folder with --cache"),
    ):
        pack(folder, cache)


def test_a_file_in_the_place_of_the_cache_is_told(folder: Path, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(PackError, match=r"cache of expert packs .* can not be used: .*choose another folder"):
        pack(folder, cache)


def test_what_killed_packings_left_is_removed_though_the_pack_is_there(folder: Path, cache: Path) -> None:
    path = pack(folder, cache)
    (cache / "packs" / ".unfinished.4711.partial").write_bytes(bytes(1000))
    assert pack(folder, cache) == path
    assert leftovers(cache) == [path.name]
    manifest = PackFile.open(path).manifest
    with contextlib.suppress(Killed), PackWriter(cache / "packs" / "other", manifest):
        (living,) = set(leftovers(cache)) - {path.name}
        assert pack(folder, cache) == path
        assert set(leftovers(cache)) == {path.name, living}
        raise Killed
    assert leftovers(cache) == [path.name]
