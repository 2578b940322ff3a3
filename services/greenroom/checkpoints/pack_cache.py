"""Makes the pack of a checkpoint, or of several, once, and finds it again.

A pack's name contains a digest of the bytes that it is made of and of their conversion. Reading whole checkpoints to
compute the digest takes long, so it is remembered under the files' path, size, modification time and inode. So a later
start is instant, and a changed file is read again and gives another pack.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import xxhash
from tqdm import tqdm

from greenroom.core.errors import CorruptCheckpoint, PackDamaged, PackError
from greenroom.core.files import write_whole
from greenroom.core.units import format_bytes
from greenroom.experts.pack.file_lock import file_lock
from greenroom.experts.pack.layout import PackManifest
from greenroom.experts.pack.pack_file import FORMAT_VERSION, PackFile, PackWriter, is_marked_damaged, sweep_dead_writers

log = logging.getLogger(__name__)

Digest = xxhash.xxh3_128
OnBytes = Callable[[int], object]

LOCK_WAIT_S: Final = 6 * 3600.0
_LOCK_POLL_S: Final = 0.2
_DIGEST_LENGTH: Final = 32
_NOT_WRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_PACKING = threading.Lock()  # two packings at once would only compete for the disk
_NOT_REMEMBERED: Final = (
    "the weights were read to know that %s is their pack, and will be at each start: %s can not be written to, or is "
    "full, where that would be remembered"
)


class PackChanged(Exception):
    """What a source has read while it wrote shows that its pack has another manifest. It is to be written anew."""


class PackSource(Protocol):
    """What a pack is made of."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def stem(self) -> str:
        """What its packs' names begin with, before the digest."""
        ...

    @property
    def command(self) -> str:
        """What makes the pack by hand."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """All files that it reads."""
        ...

    @property
    def stored_bytes(self) -> int:
        """How many bytes ``digest`` reads."""
        ...

    def description(self) -> str:
        """All that decides the pack, but for the files' contents."""
        ...

    def manifest(self, digest: str, like: PackManifest | None = None) -> PackManifest:
        """``like``: of a pack that was found. Where the source's own may be the one or the other, it is as that is."""
        ...

    def digest(self, total: Digest, on_bytes: OnBytes) -> None:
        """Read everything in the order in which ``write`` does. ``on_bytes`` is told how many bytes were read."""
        ...

    def write(self, writer: PackWriter, total: Digest, on_bytes: OnBytes) -> None:
        """Read everything once, put it into ``total`` and every record into ``writer``. ``on_bytes`` is told each
        record's size. Raises PackChanged.
        """
        ...


def default_cache_dir() -> Path:
    """``$GREENROOM_CACHE``, or ``~/.cache/greenroom``."""
    return Path(os.environ.get("GREENROOM_CACHE") or "~/.cache/greenroom").expanduser()


def find_or_make(
    source: PackSource,
    cache_dir: Path | None = None,
    *,
    progress: bool | None = None,
    force: bool = False,
    lock_wait_s: float = LOCK_WAIT_S,
    may_make: bool = True,
) -> Path:
    """The source's pack in the cache. It is made first if it is missing or damaged, or if ``force`` says so.
    ``may_make``: False refuses where it would have to be.

    ``progress``: None shows a bar on a terminal only. Of two processes that want the same pack one makes it. Files that
    killed packings have left in the cache are removed. An existing pack is found even in a read-only cache.

    Raises what the source raises, CorruptCheckpoint if it changes meanwhile. Raises PackError if the disk is too small,
    if the cache can not be read or written, or if the existing pack is another model's.
    """
    cache = cache_dir or default_cache_dir()
    try:
        sweep_dead_writers(cache / "packs")
        found = None if force else _found(source, cache, _identity(source))
        return found or _made(source, cache, force, progress, lock_wait_s, may_make)
    except OSError as error:
        raise PackError(
            f"the cache of expert packs {cache} can not be used: {_told(error)}; choose another folder with "
            "--cache-dir or GREENROOM_CACHE"
        ) from error


def _found(source: PackSource, cache: Path, identity: str) -> Path | None:
    """A whole pack whose digest is remembered. Needs no lock, because packs and remembered digests appear atomically.

    Raises PackError, OSError.
    """
    digest = _remembered(cache, identity)
    return None if digest is None else _whole(source, cache, digest)


def _whole(source: PackSource, cache: Path, digest: str) -> Path | None:
    """The pack of that digest. None: it is missing or damaged. Raises PackError, OSError."""
    path = _path(cache, source, digest)
    if not path.exists() or is_marked_damaged(path):
        return None
    with contextlib.suppress(PackDamaged):
        _check(source, path, digest)
        return path
    return None


def _check(source: PackSource, path: Path, digest: str) -> None:
    """Raises PackError if the file is not the source's pack with this digest."""
    with contextlib.closing(PackFile.open(path)) as found:
        found.require(source.manifest(digest, like=found.manifest))


def _made(
    source: PackSource, cache: Path, force: bool, progress: bool | None, lock_wait_s: float, may_make: bool
) -> Path:
    identity = _identity(source)
    with _locked(cache, identity, lock_wait_s) as may_write:
        found = None if force else _found(source, cache, identity)
        if found is not None:
            return found
        digest = None if force else _remembered(cache, identity)
        if digest is None and not force and _has_similar(cache, source):
            digest = _digest(source, progress)
            noted = may_write and _could_remember(source, cache, identity, digest)
            if not noted and (path := _whole(source, cache, digest)) is not None:
                log.warning(_NOT_REMEMBERED, path.name, cache)
                return path
        if not may_write:
            raise PackError(
                f"{cache} has no pack of {source.name} ({source.stem}), or a damaged one, and can not be written to; "
                f"make it with `{source.command}` where that is possible, or choose another folder with --cache-dir or "
                "GREENROOM_CACHE"
            )
        if digest is None or _whole(source, cache, digest) is None:
            if not may_make:
                raise PackError(f"{cache} has no pack of {source.name} ({source.stem})")
            if digest is not None and (damaged := _path(cache, source, digest)).exists():
                log.warning("the expert pack %s is damaged; it is made anew", damaged)
                damaged.unlink()  # it is of no use, and its space is needed
            digest = _write(source, cache, progress)
            if not _could_remember(source, cache, identity, digest):
                log.warning(_NOT_REMEMBERED, _path(cache, source, digest).name, cache)
        path = _path(cache, source, digest)
        _check(source, path, digest)
        return path


def _told(error: OSError) -> str:
    """The error, with the file that it concerns."""
    what = error.strerror or str(error) or type(error).__name__
    return f"{what} ({error.filename})" if error.filename else what


def _path(cache: Path, source: PackSource, digest: str) -> Path:
    return cache / "packs" / f"{source.stem}-{digest}.pack"


def _has_similar(cache: Path, source: PackSource) -> bool:
    """Whether an existing pack could be this source's. Then the source is read first, to avoid a write."""
    for path in cache.joinpath("packs").glob(_path(cache, source, "*").name):
        with contextlib.suppress(PackError, OSError):
            pack = PackFile.open(path)
            pack.close()
            if pack.manifest.layers == source.manifest("", like=pack.manifest).layers:
                return True
    return False


def _write(source: PackSource, cache: Path, progress: bool | None) -> str:
    """Make the pack in one pass over the weights, or in two where the first one shows that it is another. Returns their
    digest."""
    while True:
        with contextlib.suppress(PackChanged):
            return _write_once(source, cache, progress)


def _write_once(source: PackSource, cache: Path, progress: bool | None) -> str:
    manifest = source.manifest("0" * _DIGEST_LENGTH)
    folder = cache / "packs"
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < manifest.record_bytes:
        raise PackError(
            f"no room for the expert pack: it takes {format_bytes(manifest.record_bytes)} and {folder} has "
            f"{format_bytes(free)} free; free some space or choose another folder with --cache-dir or GREENROOM_CACHE"
        )
    log.info(
        "making the expert pack of %s: it takes %s of the %s that are free in %s",
        source.name, format_bytes(manifest.record_bytes), format_bytes(free), folder,
    )  # fmt: skip
    total = _new_digest(source)
    with (
        PackWriter(folder / "unfinished", manifest) as writer,
        _bar("packing experts", manifest.record_bytes, progress) as bar,
    ):
        source.write(writer, total, bar.update)
        digest = str(total.hexdigest())
        writer.identify(digest, _path(cache, source, digest))
    return digest


def _digest(source: PackSource, progress: bool | None) -> str:
    """Over the bytes that the pack is made of, and everything that determines their conversion."""
    total = _new_digest(source)
    with _bar("reading experts", source.stored_bytes, progress) as bar:
        source.digest(total, bar.update)
    return str(total.hexdigest())


def _new_digest(source: PackSource) -> Digest:
    return xxhash.xxh3_128(f"{FORMAT_VERSION}\n{source.description()}".encode())


def _identity(source: PackSource) -> str:
    """Identifies the files without reading them."""
    text = [f"{FORMAT_VERSION}", source.description()]
    for file in sorted(set(source.files)):
        state = file.stat()
        text.append(f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ino}")
    return str(xxhash.xxh3_128_hexdigest("\n".join(text).encode()))


class _Memo(msgspec.Struct, frozen=True):
    digest: str


def _remembered(cache: Path, identity: str) -> str | None:
    try:
        return msgspec.json.decode((cache / "digests" / f"{identity}.json").read_bytes(), type=_Memo).digest
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _remember(source: PackSource, cache: Path, identity: str, digest: str) -> None:
    if _identity(source) != identity:
        _path(cache, source, digest).unlink(missing_ok=True)
        raise CorruptCheckpoint(f"{source.name} was changed while it was read; start again")
    path = cache / "digests" / f"{identity}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(_Memo(digest)))


def _could_remember(source: PackSource, cache: Path, identity: str, digest: str) -> bool:
    """Whether it may be written, and there is room. Raises as ``_remember`` for other errors."""
    try:
        _remember(source, cache, identity, digest)
    except OSError as error:
        if error.errno not in (*_NOT_WRITABLE, *_FULL):
            raise
        return False
    return True


@contextlib.contextmanager
def _locked(cache: Path, identity: str, wait_s: float) -> Iterator[bool]:
    """Let one packing of a model run at a time on this machine. False: the cache is read-only, so none runs."""
    deadline = time.monotonic() + wait_s
    still_packing = PackError(f"another packing of this model has not ended for {wait_s:.0f} s")
    if not _PACKING.acquire(timeout=wait_s):
        raise still_packing
    try:
        with contextlib.ExitStack() as stack:
            held: bool | None = None
            try:
                folder = cache / "locks"
                folder.mkdir(parents=True, exist_ok=True)
                left_s = deadline - time.monotonic()
                held = stack.enter_context(file_lock(folder / identity, left_s, _LOCK_POLL_S))
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise
            if held is False:
                raise still_packing
            yield held is not None
    finally:
        _PACKING.release()


def _bar(what: str, nbytes: int, progress: bool | None) -> tqdm[Any]:
    disable = not sys.stderr.isatty() if progress is None else not progress
    return tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=disable, file=sys.stderr)
