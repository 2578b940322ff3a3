from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from greenroom.checkpoints.safetensors_headers import merge_headers, read_header
from greenroom.checkpoints.shard_reader import ShardReader, torch_dtype, typed
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from tests.examples import examples
from tests.unit.moe_loading.privileges import permissions_count

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 5), max_size=3)


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=6), st.tuples(shapes, st.sampled_from(DTYPES)), max_size=5))
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reads_what_the_library_writes(tmp_path: Path, tensors: dict[str, tuple[list[int], torch.dtype]]) -> None:
    path = tmp_path / "some.safetensors"
    made = {name: torch.randn(shape).mul(3).to(dtype) for name, (shape, dtype) in tensors.items()}
    save_file(made, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.keys() == made.keys()
    with ShardReader() as reader:
        for name, stored in header.items():
            whole = typed(reader.read(stored), stored)
            assert whole.dtype == made[name].dtype
            assert torch.equal(whole, made[name])
            for part in range(stored.shape[0] if stored.shape else 0):
                assert torch.equal(typed(reader.read(stored, part), stored, part), made[name][part : part + 1])


@pytest.mark.parametrize("cut", [1, 64, 500])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.zeros(40)}, path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CorruptCheckpoint, match=r"some\.safetensors.*truncated"):
        read_header(path)


def test_a_file_with_more_than_its_header_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.zeros(40)}, path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CorruptCheckpoint, match=r"has \d+ bytes where its header says \d+"):
        read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe",
        [1, 2],
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"bad\.safetensors"):
        read_header(write(tmp_path / "bad.safetensors", header, bytes(8)))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (((0, 8), (0, 8)), "has a and b overlap: they share bytes"),
        (((4, 12), (0, 8)), "has b and a overlap"),
        (((0, 8), (12, 20)), "leaves 4 bytes before b out"),
    ],
)
def test_tensors_that_overlap_or_leave_bytes_out_are_refused(tmp_path: Path, offsets: Any, message: str) -> None:
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": list(each)}
        for name, each in zip("ab", offsets, strict=True)
    }
    with pytest.raises(CorruptCheckpoint, match=rf"bad\.safetensors {message}"):
        read_header(write(tmp_path / "bad.safetensors", header, bytes(max(end for _, end in offsets))))


def test_a_shard_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    stored = read_header(path)["a"]
    path.chmod(0)
    with permissions_count():
        for reading in (lambda: read_header(path), lambda: ShardReader().read(stored)):
            with pytest.raises(CorruptCheckpoint, match=r"some\.safetensors can not be read: Permission denied"):
                reading()


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"PK\x03\x04 this is a zip file of pickles"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"bad\.safetensors"):
        read_header(tmp_path / "bad.safetensors")


def test_a_pointer_of_git_lfs_says_how_to_get_the_file(tmp_path: Path) -> None:
    pointer = tmp_path / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4995584848\n")
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors is .*: it is a pointer .* `git lfs pull`"):
        read_header(pointer)
    pointer.write_bytes(b"\xff" * 200)
    with pytest.raises(CorruptCheckpoint, match=r"no safetensors file$"):
        read_header(pointer)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"gone\.safetensors is missing"):
        read_header(tmp_path / "gone.safetensors")


def test_a_format_of_quantised_weights_has_no_dtype(tmp_path: Path) -> None:
    path = write(
        tmp_path / "fp8.safetensors", {"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)
    )
    stored = read_header(path)["a"]
    assert not stored.is_float
    with pytest.raises(UnsupportedModel, match="a is stored as F8_E4M3"):
        torch_dtype(stored)


def test_a_file_cut_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.zeros(4000)}, path)
    stored = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:1000])
    with ShardReader() as reader, pytest.raises(CorruptCheckpoint, match="ended within a"):
        reader.read(stored)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.zeros(4)}, tmp_path / name)
    headers = {tmp_path / name: read_header(tmp_path / name) for name in ("one", "two")}
    with pytest.raises(CorruptCheckpoint, match="a is both in one and in two"):
        merge_headers(headers)
