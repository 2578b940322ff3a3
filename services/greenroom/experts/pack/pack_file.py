"""The packed expert file: one contiguous 4 KiB-aligned record an expert.

    header   magic, length and checksum of the manifest, the manifest as JSON, padded to 4 KiB
    records  layer after layer, expert after expert
    trailer  a checksum for each record, a checksum of those, magic

A pack appears under its name complete or not at all: it is written to another file, which is renamed once the data is
on the disk. The manifest determines the size, so a truncated file is noticed without reading it. An altered record is
noticed when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from greenroom.core.errors import PackDamaged, PackError
from greenroom.core.units import format_bytes
from greenroom.experts.pack.chunk_writer import ChunkWriter
from greenroom.experts.pack.direct_io import DirectFile, page_aligned
from greenroom.experts.pack.layout import DTYPES, PAGE_BYTES, PLAIN, PackManifest, RecordLayout, TensorSpec, align

FORMAT_VERSION = 1
_PARTIAL = ".partial"
_DAMAGED = ".damaged"
_MAGIC = b"GRNPACK\x01"
_END = b"GRNPEND\x01"
_HEADER = struct.Struct("<8sQQ")  # magic, bytes of the manifest, checksum of the manifest
_NOUGHT = np.zeros(PAGE_BYTES, dtype=np.uint8)  # no gap of a record is longer
_TRAILER_TAIL = struct.Struct("<Q8s")  # checksum of the record checksums, magic


Weights = torch.Tensor | Sequence[torch.Tensor]
"""A tensor, or parts of its dtype that hold its bytes one after the other."""


def _checksum(*parts: bytes | memoryview) -> int:
    """Of all parts, one after the other."""
    if len(parts) == 1:
        return int(xxhash.xxh3_64_intdigest(parts[0]))
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return int(checksum.intdigest())


def _json_of(manifest: PackManifest) -> bytes:
    """A plain layer names no format, as in packs of earlier versions."""
    content = msgspec.to_builtins(manifest)
    for layer in content["layers"]:
        if layer["format"] == PLAIN:
            del layer["format"]
    return msgspec.json.encode(content)


class _Geometry:
    """Where everything lies in a pack of a given manifest."""

    def __init__(self, manifest: PackManifest, manifest_bytes: int) -> None:
        sizes = np.array(manifest.sizes(), dtype=np.int64)
        first = align(_HEADER.size + manifest_bytes, PAGE_BYTES)
        self.layer_starts = np.cumsum([0, *(layer.experts for layer in manifest.layers)])
        self.offsets = first + np.concatenate([[0], np.cumsum(sizes)])[:-1]
        self.sizes = sizes
        self.trailer = int(first + sizes.sum())
        self.total = self.trailer + 8 * len(sizes) + _TRAILER_TAIL.size

    def number(self, layer: int, expert: int) -> int:
        return int(self.layer_starts[layer]) + expert


def pack_bytes(manifest: PackManifest) -> int:
    """Of a whole pack on disk, from its header to the last checksum."""
    return _Geometry(manifest, len(_json_of(manifest))).total


class PackWriter:
    """Writes a pack; a context manager.

    A clean exit puts the pack at ``path`` atomically, or raises PackError if a record is missing. Any other exit leaves
    nothing behind. All space is reserved first, so a disk that is too small is noticed before the work. Files that
    killed writers have left beside ``path`` are removed.
    """

    def __init__(self, path: Path, manifest: PackManifest) -> None:
        self._path = path
        self._manifest = manifest
        self._json = _json_of(manifest)
        self._geometry = _Geometry(manifest, len(self._json))
        self._checksums = np.zeros(manifest.experts, dtype="<u8")
        self._written = np.zeros(manifest.experts, dtype=bool)
        # Not named by the process id: containers that share a folder may all have 1.
        self._partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{_PARTIAL}")
        self._fd = -1
        self._chunks: ChunkWriter | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        sweep_dead_writers(self._path.parent)
        self._fd = _open_locked(self._partial)
        try:
            os.posix_fallocate(self._fd, 0, self._geometry.total)
            self._pwrite(_HEADER.pack(_MAGIC, len(self._json), _checksum(self._json)) + self._json, 0)
            self._chunks = ChunkWriter(self._partial, self._fd)
        except BaseException as error:
            self._discard()
            raise self._explained(error) from error
        return self

    def identify(self, source_digest: str, path: Path) -> None:
        """Set the manifest's digest (of the same length) and the pack's path (in the same folder).

        For a writer that knows them only after it has read all weights.
        """
        manifest = dataclasses.replace(self._manifest, source_digest=source_digest)
        encoded = _json_of(manifest)
        if len(encoded) != len(self._json) or path.parent != self._path.parent:
            raise PackError(f"a pack can not be renamed to {path} with the digest {source_digest} while it is written")
        self._manifest, self._json, self._path = manifest, encoded, path
        self._pwrite(_HEADER.pack(_MAGIC, len(encoded), _checksum(encoded)) + encoded, 0)

    def write(self, layer: int, expert: int, tensors: Sequence[Weights]) -> None:
        """One expert's tensors, in the order, shapes and dtypes of its layout. They are copied. One may come in parts.

        The disk writes them meanwhile, so a failure of it is raised here for an earlier expert, or at the exit.
        """
        if self._chunks is None:
            raise PackError(f"the pack {self._path} is not open")
        layout = self._manifest.layers[layer].layout
        _check_tensors(layout, tensors, self._manifest.layers[layer].name, expert)
        number = self._geometry.number(layer, expert)
        checksum = xxhash.xxh3_64()
        try:
            self._chunks.seek(int(self._geometry.offsets[number]))
            for data in _record_of(layout, tensors):
                checksum.update(data.data)
                self._chunks.append(data)
        except OSError as error:
            raise self._explained(error) from error
        self._checksums[number] = checksum.intdigest()
        self._written[number] = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            if not self._written.all():
                raise PackError(f"{int((~self._written).sum())} of {len(self._written)} experts were not written")
            if self._chunks is not None:
                self._chunks.flush()
                self._chunks.close()
            checksums = self._checksums.tobytes()
            self._pwrite(checksums + _TRAILER_TAIL.pack(_checksum(checksums), _END), self._geometry.trailer)
            os.fsync(self._fd)
            os.rename(self._partial, self._path)
            with contextlib.suppress(OSError):
                _damage_mark(self._path).unlink(missing_ok=True)
        except BaseException as failure:
            self._discard()
            raise self._explained(failure) from failure
        os.close(self._fd)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _pwrite(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def _discard(self) -> None:
        if self._chunks is not None:
            self._chunks.close()
        with contextlib.suppress(FileNotFoundError):
            self._partial.unlink()
        os.close(self._fd)

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            return PackError(
                f"no room for the expert pack: {self._path.parent} has to hold {format_bytes(self._geometry.total)} "
                f"({error.strerror}); free some space or choose another folder with --cache-dir or GREENROOM_CACHE"
            )
        return error


class PackFile:
    """An open pack. Reads are thread-safe. Each record is compared with its checksum when it is first read, and
    each time once the file was written to."""

    def __init__(self, path: Path, file: DirectFile, manifest: PackManifest, geometry: _Geometry) -> None:
        self.path = path
        self.manifest = manifest
        self._file = file
        self._geometry = geometry
        self._checksums: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self._checked = np.zeros(manifest.experts, dtype=bool)
        self._modified_ns = file.modified_ns()

    @classmethod
    def open(cls, path: Path, expected: PackManifest | None = None) -> PackFile:
        """Raises PackDamaged if the file is half-written, truncated or altered. Raises PackError if it is missing, can
        not be read, or does not have the manifest ``expected``.
        """
        try:
            file = DirectFile(path)
        except FileNotFoundError:
            raise PackError(f"no expert pack at {path}; make it with `greenroom pack MODEL`") from None
        except OSError as error:
            raise PackError(f"the expert pack {path} can not be read: {error.strerror or error}") from error
        try:
            head = file.read(0, PAGE_BYTES)
            manifest_json = cls._manifest_json(path, file, head)
            manifest = msgspec.json.decode(manifest_json, type=PackManifest)
            pack = cls(path, file, manifest, _Geometry(manifest, len(manifest_json)))
            if expected is not None:
                pack.require(expected)
            pack._load_checksums()
        except msgspec.MsgspecError as error:
            file.close()
            raise _refused(path, f"its manifest can not be read ({error})") from error
        except BaseException:
            file.close()
            raise
        return pack

    def require(self, expected: PackManifest) -> None:
        """Raises PackError unless this is its manifest."""
        if self.manifest != expected:
            raise PackError(f"{self.path} is the pack of another model: {_difference(self.manifest, expected)}")

    @staticmethod
    def _manifest_json(path: Path, file: DirectFile, head: bytes) -> bytes:
        if len(head) < _HEADER.size:
            raise _refused(path, "it is truncated within its header")
        magic, length, checksum = _HEADER.unpack_from(head)
        if magic != _MAGIC:
            raise _refused(path, "it is no pack of this version")
        if length > file.size:
            raise _refused(path, "it is truncated within its header")
        manifest_json = file.read(0, align(_HEADER.size + length, PAGE_BYTES))[_HEADER.size : _HEADER.size + length]
        if _checksum(manifest_json) != checksum:
            raise _refused(path, "its manifest was altered")
        return manifest_json

    def _load_checksums(self) -> None:
        if self._file.size != self._geometry.total:
            raise _refused(
                self.path,
                f"it has {self._file.size} bytes, not {self._geometry.total}: it was truncated or altered",
            )
        trailer = self._file.read_unaligned(self._geometry.trailer, self._geometry.total - self._geometry.trailer)
        checksum, magic = _TRAILER_TAIL.unpack(trailer[-_TRAILER_TAIL.size :])
        checksums = trailer[: -_TRAILER_TAIL.size]
        if magic != _END:
            raise _refused(self.path, "it was not written to its end")
        if _checksum(checksums) != checksum:
            raise _refused(self.path, "its checksums were altered")
        self._checksums = np.frombuffer(checksums, dtype="<u8")

    @property
    def direct(self) -> bool:
        """Whether reads bypass the page cache, which not every file system supports."""
        return self._file.direct

    def layout(self, layer: int) -> RecordLayout:
        return self.manifest.layers[layer].layout

    def read_part(self, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        """Fill the page-aligned ``buffer`` with a record's bytes from ``start``, a multiple of 4 KiB, without a check.

        Raises OSError if the disk fails.
        """
        self.read_pieces(layer, expert, start, [buffer])

    def read_pieces(self, layer: int, expert: int, start: int, pieces: Sequence[memoryview]) -> None:
        """As ``read_part``, into page-aligned ``pieces`` of whole pages, one after the other."""
        self._file.read_into(int(self._geometry.offsets[self._geometry.number(layer, expert)]) + start, *pieces)

    def is_checked(self, layer: int, expert: int) -> bool:
        """Whether ``check`` has found the record to be what was stored, and the file is as it was opened."""
        number = self._geometry.number(layer, expert)
        return bool(self._checked[number]) and self._file.modified_ns() == self._modified_ns

    def check(self, layer: int, expert: int, record: memoryview) -> None:
        """Compare the whole record with its checksum, unless that was done and the file is as it was opened.

        Raises PackDamaged if they differ. It then marks the pack as damaged for the next start (``is_marked_damaged``),
        unless another pack has replaced it.
        """
        self.check_pieces(layer, expert, [record])

    def check_pieces(self, layer: int, expert: int, pieces: Sequence[memoryview]) -> None:
        """As ``check``, of a record that lies in ``pieces``."""
        if self.is_checked(layer, expert):
            return
        number = self._geometry.number(layer, expert)
        if _checksum(*pieces) != int(self._checksums[number]):
            with contextlib.suppress(OSError):
                if self._file.is_at(self.path):
                    _damage_mark(self.path).touch()
            raise _refused(self.path, f"expert {expert} of {self.manifest.layers[layer].name} was altered")
        self._checked[number] = True

    def read_into(self, layer: int, expert: int, buffer: memoryview) -> int:
        """Read one record into ``buffer``, page-aligned and large enough. Returns the record's size in bytes.

        Raises PackError if the record was altered, OSError if the disk fails.
        """
        nbytes = int(self._geometry.sizes[self._geometry.number(layer, expert)])
        self.read_part(layer, expert, 0, buffer[:nbytes])
        self.check(layer, expert, buffer[:nbytes])
        return nbytes

    def verify(self, progress: Callable[[int], object] | None = None) -> None:
        """Read and check all records. ``progress`` is told the bytes of each. Raises PackError."""
        self._checked[:] = False
        buffer = page_aligned(max(int(self._geometry.sizes.max(initial=0)), PAGE_BYTES))
        for layer, spec in enumerate(self.manifest.layers):
            for expert in range(spec.experts):
                nbytes = self.read_into(layer, expert, buffer)
                if progress is not None:
                    progress(nbytes)

    def close(self) -> None:
        self._file.close()


def is_marked_damaged(path: Path) -> bool:
    """Whether a read has found an altered record in the pack. (Opening a pack does not read its records.)"""
    return os.path.exists(_damage_mark(path))


def _damage_mark(path: Path) -> Path:
    return path.with_suffix(_DAMAGED)


def _refused(path: Path, why: str) -> PackDamaged:
    return PackDamaged(
        f"the expert pack {path} can not be used: {why}; make it anew with `greenroom pack --force MODEL`, or "
        "`greenroom coe pack --force FILE` if it is a collaboration's"
    )


def _difference(found: PackManifest, expected: PackManifest) -> str:
    for field in ("model_type", "dtype", "source_digest"):
        if getattr(found, field) != getattr(expected, field):
            return f"{field} is {getattr(found, field)!r}, not {getattr(expected, field)!r}"
    return "its layers or shapes differ"


def _check_tensors(layout: RecordLayout, tensors: Sequence[Weights], layer: str, expert: int) -> None:
    if len(tensors) == len(layout.tensors) and all(map(_fits, layout.tensors, tensors)):
        return
    found = [
        [(tuple(part.shape), str(part.dtype).removeprefix("torch.")) for part in _parts_of(tensor)]
        for tensor in tensors
    ]
    wanted = [(spec.shape, spec.dtype) for spec in layout.tensors]
    raise PackError(f"expert {expert} of {layer} has tensors {found}, its layout wants {wanted}")


def _fits(spec: TensorSpec, tensor: Weights) -> bool:
    if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) != spec.shape:
        return False
    parts = _parts_of(tensor)
    return {part.dtype for part in parts} == {DTYPES[spec.dtype]} and sum(part.nbytes for part in parts) == spec.nbytes


def _parts_of(tensor: Weights) -> Sequence[torch.Tensor]:
    return [tensor] if isinstance(tensor, torch.Tensor) else tensor


def _record_of(layout: RecordLayout, tensors: Sequence[Weights]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a record, one after the other: those of the tensors, and zeros between and behind them."""
    done = 0
    for spec, tensor in zip(layout.tensors, tensors, strict=True):
        yield _NOUGHT[: spec.offset - done]
        for part in _parts_of(tensor):
            yield part.detach().contiguous().view(-1).view(torch.uint8).numpy()
        done = spec.offset + spec.nbytes
    yield _NOUGHT[: layout.nbytes - done]


def sweep_dead_writers(folder: Path) -> None:
    """Remove the partial files that killed writers have left in ``folder``.

    A living writer holds a lock on its partial file, so a file without a lock has no writer.
    """
    for leftover in folder.glob(f".*{_PARTIAL}"):
        with contextlib.suppress(OSError):
            fd = os.open(leftover, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
            finally:
                os.close(fd)


def _open_locked(partial: Path) -> int:
    """A new file, locked to show that it has a writer. Raises OSError."""
    while True:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            partial.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)  # another process has swept it before it was locked
