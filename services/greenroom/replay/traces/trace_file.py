"""A trace's arrays in an ``.npz`` file, without pickles."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError
from greenroom.policies.base.events import Phase


class TraceError(GreenroomError):
    """A routing trace that can not be read or written, or that contradicts itself."""


_REQUIRED = ("experts", "seq_starts", "num_experts")
_OPTIONAL = (
    "layer_ids", "top_k", "phase", "step", "token", "token_texts", "task", "request", "arrival", "expert_bytes",
    "model", "decoder_start",
)  # fmt: skip
_INTEGERS = ("seq_starts", "layer_ids", "top_k", "step", "token")
_TEXTS = {"task": "sequence", "request": "sequence", "token_texts": "id"}


def read(path: Path) -> dict[str, Any]:
    """The fields of a RoutingTrace; arrays of other names are ignored. Raises TraceError."""
    try:
        with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in (*_REQUIRED, *_OPTIONAL) if name in stored.files}
    except (OSError, ValueError, BadZipFile, zlib.error, EOFError, RuntimeError, MemoryError) as error:
        raise TraceError(str(error)) from error
    return _fields(arrays)


def write(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a file that appears whole: a reader sees the old one or the new. Raises TraceError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            with partial.open("wb") as file:
                with ZipFile(file, "w", ZIP_DEFLATED) as archive:
                    for name, array in arrays.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            np.lib.format.write_array(member, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{path} can not be written: {error}") from error


def _fields(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """A RoutingTrace's constructor arguments. Raises TraceError for an array that is missing or of a wrong type."""
    for name in _REQUIRED:
        if name not in arrays:
            raise TraceError(f"it has no array {name!r}")
    fields: dict[str, Any] = dict(arrays)
    for name, array in arrays.items():
        kinds = "U" if name in (*_TEXTS, "model") else "iuf" if name == "arrival" else "iu"
        if array.dtype.kind not in kinds:
            wanted = {"U": "text", "iuf": "numbers", "iu": "integers"}[kinds]
            raise TraceError(f"{name} must be {wanted}, not {array.dtype}")
        if name in _INTEGERS:
            fields[name] = array.astype(np.int64)
        elif name in ("num_experts", "expert_bytes"):
            fields[name] = int(array) if array.ndim == 0 else array.astype(np.int64)
        elif name == "decoder_start":
            if array.ndim:
                raise TraceError("decoder_start must be one number")
            fields[name] = int(array)
        elif name == "phase":
            if array.size and not 0 <= int(array.min()) <= int(array.max()) <= max(Phase):
                raise TraceError(f"phase must lie from 0 to {max(Phase)}")
            fields[name] = array.astype(np.uint8)
        elif name == "arrival":
            fields[name] = array.astype(np.float64)
        elif name in _TEXTS:
            if array.ndim != 1:
                raise TraceError(f"{name} must have one entry a {_TEXTS[name]}")
            fields[name] = tuple(array.tolist())
        elif name == "model":
            fields[name] = str(array)
    return fields
