"""A pack appears whole or not at all, and is refused when anything about it is wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash

from greenroom.core.errors import PackDamaged, PackError
from greenroom.experts.all_resident import ResidentExperts
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import PackLayer, PackManifest, RecordLayout
from greenroom.experts.pack.pack_file import PackFile, PackWriter, is_marked_damaged

LAYOUT = RecordLayout.of([("gate_up_proj", (24, 16), "bfloat16"), ("down_proj", (16, 12), "bfloat16")])
WIDE = RecordLayout.of([("gate_up_proj", (64, 64), "float32"), ("bias", (5,), "float32")])
MANIFEST = PackManifest(
    "mixtral", "bfloat16", "abc", (PackLayer("a.experts", 3, 2, LAYOUT), PackLayer("b.experts", 2, 1, WIDE))
)


def tensors_of(layer: int, expert: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * layer + expert)
    return [
        torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for spec in MANIFEST.layers[layer].layout.tensors
    ]


def write_pack(path: Path, manifest: PackManifest = MANIFEST) -> None:
    with PackWriter(path, manifest) as writer:
        for layer, spec in enumerate(manifest.layers):
            for expert in range(spec.experts):
                writer.write(layer, expert, tensors_of(layer, expert))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_pack(tmp_path / "x.pack")
    return tmp_path / "x.pack"


def test_every_expert_comes_back_as_it_was_written(path: Path) -> None:
    pack = PackFile.open(path, MANIFEST)
    experts = ResidentExperts.of_pack(pack)
    for layer, spec in enumerate(MANIFEST.layers):
        with experts.routed(layer, torch.arange(spec.experts)[None].numpy()) as landing:
            for expert, weights in landing:
                for got, wanted in zip(weights, tensors_of(layer, expert), strict=True):
                    assert torch.equal(got, wanted)
    pack.verify()
    pack.close()


def test_records_are_page_aligned_and_tensors_on_cache_lines() -> None:
    for layout in (LAYOUT, WIDE):
        assert layout.nbytes % 4096 == 0
        assert all(spec.offset % 64 == 0 for spec in layout.tensors)


def test_a_pack_is_to_the_byte_what_earlier_versions_wrote(tmp_path: Path) -> None:
    """So theirs stay valid. The magic is to change with the digest."""
    with PackWriter(tmp_path / "x.pack", MANIFEST) as writer:
        for layer, spec in enumerate(MANIFEST.layers):
            for expert in range(spec.experts):
                weights = [torch.arange(one.nbytes).to(torch.uint8) + expert for one in spec.layout.tensors]
                writer.write(layer, expert, [
                    own.view(getattr(torch, one.dtype)).view(one.shape)
                    for own, one in zip(weights, spec.layout.tensors, strict=True)
                ])  # fmt: skip
    assert xxhash.xxh3_64_hexdigest((tmp_path / "x.pack").read_bytes()) == "8181a43754b460e0"


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9, 0.9999])
def test_a_truncated_pack_is_refused(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(PackError, match=r"truncated.*greenroom pack --force"):
        PackFile.open(path)


@pytest.mark.parametrize("place", ["magic", "manifest", "record", "checksums", "end", "appended"])
def test_an_altered_pack_is_refused(path: Path, place: str) -> None:
    size = path.stat().st_size
    at = {"magic": 1, "manifest": 60, "record": size // 2, "checksums": size - 30, "end": size - 2, "appended": size}
    data = bytearray(path.read_bytes()) + (b"x" if place == "appended" else b"")
    data[at[place]] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(PackError, match=str(path)):
        PackFile.open(path, MANIFEST).verify()


def test_a_pack_that_took_a_damaged_one_s_place_is_not_marked(path: Path) -> None:
    """A process that still has the old one would otherwise have each start make it anew."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    old = PackFile.open(path)
    with pytest.raises(PackDamaged):
        old.verify()
    assert is_marked_damaged(path)
    write_pack(path)
    with pytest.raises(PackDamaged):
        old.verify()
    assert not is_marked_damaged(path)


def test_a_record_is_checked_again_once_the_file_was_written_to(path: Path) -> None:
    os.utime(path, ns=(0, 0))  # times are coarse, and this one is to differ from that of the write
    pack = PackFile.open(path)
    pack.verify()
    assert pack.is_checked(0, 0)
    offset = int(pack._geometry.offsets[0])
    with path.open("r+b") as file:
        file.seek(offset)
        first = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([first ^ 1]))
    record = page_aligned(LAYOUT.nbytes)
    with pytest.raises(PackDamaged, match=r"expert 0 of .* was altered"):
        pack.read_into(0, 0, record)
    assert is_marked_damaged(path)
    pack.close()


def test_the_pack_of_another_model_is_refused(path: Path) -> None:
    other = PackManifest("mixtral", "bfloat16", "other content", MANIFEST.layers)
    with pytest.raises(PackError, match=r"another model.*source_digest is 'abc', not 'other content'"):
        PackFile.open(path, other)


def test_a_missing_pack_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="greenroom pack"):
        PackFile.open(tmp_path / "none.pack")


def test_an_unfinished_writer_leaves_nothing_behind(tmp_path: Path) -> None:
    with (
        pytest.raises(PackError, match="4 of 5 experts were not written"),
        PackWriter(tmp_path / "x.pack", MANIFEST) as writer,
    ):
        writer.write(0, 0, tensors_of(0, 0))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file system can not reserve space."""
    original = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        PackError, match=r"no room for the expert pack: .*No space left on device.*--cache-dir or GREENROOM_CACHE"
    ):
        write_pack(tmp_path / "x.pack")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"), PackWriter(tmp_path / "x.pack", MANIFEST):
        pass
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_the_wrong_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="its layout wants"), PackWriter(tmp_path / "x.pack", MANIFEST) as writer:
        writer.write(0, 0, tensors_of(1, 0))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_may_come_in_parts(tmp_path: Path, path: Path) -> None:
    with PackWriter(tmp_path / "parts.pack", MANIFEST) as writer:
        for layer, spec in enumerate(MANIFEST.layers):
            for expert in range(spec.experts):
                writer.write(layer, expert, [one.view(-1).tensor_split(3) for one in tensors_of(layer, expert)])
    assert (tmp_path / "parts.pack").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("wrong", ["bytes", "dtype", "number"])
def test_parts_that_are_not_the_tensor_are_refused(tmp_path: Path, wrong: str) -> None:
    first, second = tensors_of(0, 0)
    parts = {
        "bytes": ([first[:2], first[3:]], second),
        "dtype": ([first.view(torch.float16)], second),
        "number": ([first, second],),
    }
    with pytest.raises(PackError, match="its layout wants"), PackWriter(tmp_path / "x.pack", MANIFEST) as writer:
        writer.write(0, 0, parts[wrong])
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_swept_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; import test_pack as t\n"
        "with t.PackWriter(pathlib.Path(sys.argv[1]) / 'x.pack', t.MANIFEST) as writer:\n"
        "    print('open', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        write_pack(tmp_path / "x.pack")
        assert len(list(tmp_path.iterdir())) == 2, "the partial file of a living writer is its own"
        child.send_signal(signal.SIGKILL)
    write_pack(tmp_path / "x.pack")
    assert [file.name for file in tmp_path.iterdir()] == ["x.pack"]
