"""Headers of GGUF files: read as the ``gguf`` package reads them, and refused wherever they can not be."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.core.units import MIB
from greenroom.gguf.block_types import TYPES
from greenroom.gguf.header import GgufHeader, read_header

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")

TOKENS = ["a", "ä", "", "日本"]


def written(path: Path, *, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"unsigned.{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"signed.{bits}", -(2 ** (bits - 1)))
    writer.add_float32("float.32", 1e-6)
    writer.add_float64("float.64", 1 / 3)
    writer.add_bool("yes", True)
    writer.add_string("text", "Zeichen")
    writer.add_array("texts", TOKENS)
    writer.add_array("numbers", [3, -4])
    writer.add_array("flags", [True, False])
    writer.add_tensor("plain", np.arange(15, dtype=np.float32).reshape(3, 5))
    blocks = np.arange(2 * 3 * 68, dtype=np.uint8).reshape(2, 3, 68)
    writer.add_tensor("coded", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_the_types_are_is_what_ggml_says() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {number: (kind.name, kind.numbers, kind.nbytes) for number, kind in TYPES.items()}
    # ggml itself adds a sum to Q8_1 and Q8_K, which no file has; the package counts it in another width.
    assert {number for number, kind in ours.items() if theirs[number] != kind} <= {9, 15}


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_and_tensors_are_read_as_they_were_written(tmp_path: Path, alignment: int | None) -> None:
    path = written(tmp_path / "a.gguf", alignment=alignment)
    header = read_header(path)
    assert header.metadata["general.architecture"] == "qwen3moe"
    assert [header.metadata[f"unsigned.{bits}"] for bits in (8, 64)] == [255, 2**64 - 1]
    assert [header.metadata[f"signed.{bits}"] for bits in (16, 64)] == [-(2**15), -(2**63)]
    assert header.metadata["float.32"] == 1e-6, "the shortest number of float32, as people wrote it"
    assert header.metadata["float.64"] == 1 / 3
    assert header.metadata["yes"] is True
    assert header.metadata["texts"] == TOKENS
    assert header.metadata["numbers"] == [3, -4]
    assert header.metadata["flags"] == [True, False]
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert header.tensors.keys() == theirs.keys()
    for name, tensor in header.tensors.items():
        other = theirs[name]
        assert tensor.shape == tuple(int(size) for size in reversed(other.shape))
        assert (tensor.offset, tensor.nbytes) == (other.data_offset, other.n_bytes)
        assert tensor.type.name == other.tensor_type.name
        assert path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes] == other.data.tobytes()


def packed(*parts: tuple[str, Any]) -> bytes:
    return b"".join(struct.pack(f"<{code}", value) for code, value in parts)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return packed(("Q", len(data))) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + packed(("I", kind)) + value


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + packed(("I", len(sizes)), *(("Q", size) for size in sizes), ("I", kind), ("Q", offset))


def file_of(pairs: list[bytes] = [], tensors: list[bytes] = [], data: bytes = b"", *, version: int = 3) -> bytes:  # noqa: B006
    head = b"GGUF" + packed(("I", version), ("Q", len(tensors)), ("Q", len(pairs))) + b"".join([*pairs, *tensors])
    return head + bytes(-len(head) % 32) + data


def refused(path: Path, content: bytes, match: str, kind: type[Exception] = CorruptCheckpoint) -> None:
    path.write_bytes(content)
    with pytest.raises(kind, match=match) as raised:
        read_header(path)
    assert path.name in str(raised.value), "which file it is"


HUGE = 2**63
BROKEN: dict[str, tuple[bytes, str]] = {
    "another file": (b"PK\x03\x04" + bytes(40), "does not begin with GGUF"),
    "nothing": (b"", "truncated within its header"),
    "no counts": (b"GGUF" + packed(("I", 3)), "truncated within its header"),
    "more tensors than bytes": (b"GGUF" + packed(("I", 3), ("Q", HUGE), ("Q", 0)) + bytes(64), "tensors"),
    "more keys than bytes": (b"GGUF" + packed(("I", 3), ("Q", 0), ("Q", HUGE)) + bytes(64), "keys"),
    "a key longer than the file": (file_of([packed(("Q", HUGE)) + b"abc"]) + bytes(32), "bytes of a key"),
    "a text longer than the file": (file_of([pair("long", 8, packed(("Q", 2**40)))]) + bytes(32), "bytes of long"),
    "more texts than bytes": (file_of([pair("many", 9, packed(("I", 8), ("Q", 2**40)))]) + bytes(32), "texts in many"),
    "more numbers than bytes": (
        file_of([pair("many", 9, packed(("I", 10), ("Q", 2**61)))]) + bytes(32),
        "numbers in many",
    ),
    "lists of lists": (file_of([pair("nested", 9, packed(("I", 9), ("Q", 1)))]) + bytes(32), "a list of type 9"),
    "a type that is none": (file_of([pair("odd", 13, b"")]) + bytes(32), "odd .* type 13"),
    "neither true nor false": (file_of([pair("flag", 7, b"\x02")]), "flag .* is 2"),
    "the same key twice": (file_of([pair("one", 0, b"\x01")] * 2), "has one twice"),
    "a key that is no text": (file_of([text(b"\xff\xfe") + packed(("I", 0)) + b"\x01"]), "no valid UTF-8"),
    "an alignment of 0": (file_of([pair("general.alignment", 4, packed(("I", 0)))]), "general.alignment"),
    "an alignment of 48": (file_of([pair("general.alignment", 4, packed(("I", 48)))]), "general.alignment"),
    "an alignment of a GiB": (file_of([pair("general.alignment", 4, packed(("I", 2**30)))]), "general.alignment"),
    "five dimensions": (file_of([], [tensor("deep", [1] * 5)], bytes(32)), "deep .* 5 dimensions"),
    "a width of 0": (file_of([], [tensor("flat", [0, 4])], bytes(32)), r"flat .* the shape \(4, 0\)"),
    "sizes whose product wraps": (file_of([], [tensor("wide", [2**33, 2**33])], bytes(32)), "wide .* the shape"),
    "half a block": (file_of([], [tensor("blk", [128, 4], 12)], bytes(512)), "blk .* rows of 128 numbers as Q4_K"),
    "a tensor beyond the file": (file_of([], [tensor("far", [64])], bytes(32)), "ends within far"),
    "a gap": (file_of([], [tensor("late", [8], 0, 32)], bytes(64)), "late .* begins at byte"),
    "tensors that overlap": (file_of([], [tensor("a", [8]), tensor("b", [8])], bytes(64)), "b .* begins at byte"),
    "the same tensor twice": (file_of([], [tensor("a", [8]), tensor("a", [8], 0, 32)], bytes(64)), "has a twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_refused_by_file_and_place(tmp_path: Path, case: str) -> None:
    content, match = BROKEN[case]
    refused(tmp_path / "bad.gguf", content, match)


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path / "old.gguf", file_of(version=1), "version 1", UnsupportedModel)
    refused(tmp_path / "big.gguf", b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian", UnsupportedModel)
    refused(tmp_path / "new.gguf", file_of([], [tensor("x", [32], 77)], bytes(64)), "type 77", UnsupportedModel)


def test_a_file_that_is_missing_or_may_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="is missing"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(CorruptCheckpoint, match="can not be read"):
        read_header(tmp_path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("sound") / "a.gguf").read_bytes()


def attempted(path: Path, content: bytes) -> GgufHeader | None:
    """None: refused, as it has to be, and without more memory than the file is worth."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        return read_header(path)
    except (CorruptCheckpoint, UnsupportedModel):
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * MIB


def test_a_file_that_ends_anywhere_before_its_end_is_refused(tmp_path: Path, sound: bytes) -> None:
    data = read_header(written(tmp_path / "a.gguf")).tensors["coded"]
    for end in range(0, data.offset + data.nbytes, 7):
        assert attempted(tmp_path / "cut.gguf", sound[:end]) is None, end


FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
changes = st.lists(st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)


@FUZZ
@given(changes=changes, end=st.integers(0, 200))
def test_bytes_that_were_changed_end_in_an_answer_or_an_error(
    tmp_path: Path, sound: bytes, changes: list[tuple[int, bytes]], end: int
) -> None:
    content = bytearray(sound)
    for place, data in changes:
        at = place % len(content)
        content[at : at + len(data)] = data
    attempted(tmp_path / "changed.gguf", bytes(content[: len(content) - end]))


values = st.one_of(
    st.tuples(st.integers(0, 14), st.binary(max_size=40)),
    st.builds(lambda kind, count, rest: (9, packed(("I", kind), ("Q", count)) + rest),
              st.integers(0, 14), st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1)), st.binary(max_size=40)),
)  # fmt: skip
infos = st.builds(
    tensor,
    st.text(max_size=9),
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1)), max_size=6),
    st.integers(0, 45),
    st.one_of(st.integers(0, 512), st.integers(0, 2**64 - 1)),
)


@FUZZ
@given(pairs=st.lists(st.tuples(st.text(max_size=9), values), max_size=4), infos=st.lists(infos, max_size=4))
def test_headers_of_any_parts_end_in_an_answer_or_an_error(
    tmp_path: Path, pairs: list[tuple[str, tuple[int, bytes]]], infos: list[bytes]
) -> None:
    made = [pair(key, kind, value) for key, (kind, value) in pairs]
    found = attempted(tmp_path / "made.gguf", file_of(made, infos, bytes(4096)))
    if found is not None:
        assert len(found.tensors) == len(infos)
