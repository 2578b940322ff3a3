"""safetensors files without torch: the few dtypes that artifacts have, written and read by numpy alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from greenroom.core.errors import GreenroomError
from greenroom.core.units import MIB

_DTYPES = {"F16": "<f2", "F32": "<f4", "I8": "|i1", "U8": "|u1", "U16": "<u2", "U32": "<u4"}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 8 * MIB


class Damaged(GreenroomError):
    """Bytes that are no artifact, or were altered."""


def dump_tensors(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file: eight bytes of header length, the header as JSON, the arrays, little-endian in C order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array)
        header[name] = {
            "dtype": _NAMES[data.dtype],
            "shape": list(data.shape),
            "data_offsets": [offset, offset + data.nbytes],
        }
        offset += data.nbytes
        parts.append(data.data.cast("B") if data.size else b"")
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def load_tensors(data: bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The arrays, read-only views of ``data``, and the metadata. Raises Damaged."""
    try:
        return _load(data)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error, RecursionError) as error:
        raise Damaged(f"it is no safetensors file of arrays: {error!r:.200}") from error


def _load(data: bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    (length,) = struct.unpack_from("<Q", data)
    if length > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = memoryview(data)[8 + length :]
    arrays = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        start, stop = entry["data_offsets"]
        if start != end or stop < start or stop > len(body):
            raise ValueError(f"{name} lies at {start} to {stop}")
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        flat = np.frombuffer(body[start:stop], dtype) if stop > start else np.empty(0, dtype)
        arrays[name] = flat.reshape(shape)
        end = stop
    if end != len(body):
        raise ValueError(f"{len(body) - end} bytes behind the last array")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("metadata that is no text")
    return arrays, metadata
