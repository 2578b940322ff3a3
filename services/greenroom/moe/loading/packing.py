"""Makes the packed expert file of a checkpoint once, and finds it again.

A pack's name contains a digest of the expert tensors' bytes and of their conversion. Reading a whole checkpoint to
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from tqdm import tqdm

from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, PackDamaged, PackError
from greenroom.core.files import write_whole
from greenroom.core.units import format_bytes
from greenroom.experts.pack.file_lock import file_lock
from greenroom.experts.pack.layout import FLOATS, PackLayer, PackManifest, RecordLayout
from greenroom.experts.pack.pack_file import FORMAT_VERSION, PackFile, PackWriter, is_marked_damaged, sweep_dead_writers
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.conversion import ExpertPlan, Recipe
from greenroom.moe.loading.safetensors_files import ShardReader, typed

log = logging.getLogger(__name__)

CONVERSION_VERSION = 1  # increased when the same tensors are to give another pack
Buffers = dict[tuple[str, str], torch.Tensor]
"""Memory for reads that is reused, by recipe and feed."""

_LOCK_WAIT_S = 6 * 3600.0
_LOCK_POLL_S = 0.2
_DIGEST_LENGTH = 32
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_PACKING = threading.Lock()  # two packings at once would only compete for the disk


def default_cache_dir() -> Path:
    """``$GREENROOM_CACHE``, or ``~/.cache/greenroom``."""
    return Path(os.environ.get("GREENROOM_CACHE") or "~/.cache/greenroom").expanduser()


def resolve_dtype(checkpoint: Checkpoint, dtype: str = "auto") -> torch.dtype:
    """``auto`` is the checkpoint's own. Raises InvalidConfig for a dtype that experts can not have."""
    name = checkpoint.stored_dtype if dtype == "auto" else dtype
    if name not in FLOATS:
        raise InvalidConfig("dtype", name, f"use auto or one of {', '.join(sorted(FLOATS))}")
    return FLOATS[name]


def ensure_pack(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    cache_dir: Path | None = None,
    *,
    progress: bool | None = None,
    force: bool = False,
    lock_wait_s: float = _LOCK_WAIT_S,
) -> Path:
    """The checkpoint's pack in the cache. It is made first if it is missing or damaged, or if ``force`` says so.

    ``progress``: None shows a bar on a terminal only. Needs constant memory, because it converts one expert at a time.
    Of two processes that want the same pack one makes it. Files that killed packings have left in the cache are
    removed. An existing pack is found even in a read-only cache.

    Raises UnsupportedModel or CorruptCheckpoint if the experts can not be made. Raises PackError if the disk is too
    small, if the cache can not be read or written, or if the existing pack is another model's.
    """
    plan = ExpertPlan(checkpoint, resolve_dtype(checkpoint, dtype))
    cache = cache_dir or default_cache_dir()
    try:
        sweep_dead_writers(cache / "packs")
        found = None if force else _found(plan, cache, _identity(plan))
        return found or _made(plan, cache, force, progress, lock_wait_s)
    except OSError as error:
        raise PackError(
            f"the cache of expert packs {cache} can not be used: {_told(error)}; choose another folder with "
            "--cache-dir or GREENROOM_CACHE"
        ) from error


def _found(plan: ExpertPlan, cache: Path, identity: str) -> Path | None:
    """A whole pack whose digest is remembered. Needs no lock, because packs and remembered digests appear atomically.

    Raises PackError, OSError.
    """
    digest = _remembered(cache, identity)
    return None if digest is None else _whole(plan, cache, digest)


def _whole(plan: ExpertPlan, cache: Path, digest: str) -> Path | None:
    """The pack of that digest. None: it is missing or damaged. Raises PackError, OSError."""
    path = _path(cache, plan, digest)
    if not path.exists() or is_marked_damaged(path):
        return None
    with contextlib.suppress(PackDamaged):
        PackFile.open(path, _manifest(plan, digest)).close()
        return path
    return None


def _made(plan: ExpertPlan, cache: Path, force: bool, progress: bool | None, lock_wait_s: float) -> Path:
    identity = _identity(plan)
    with _locked(cache, identity, lock_wait_s) as may_write:
        found = None if force else _found(plan, cache, identity)
        if found is not None:
            return found
        digest = None if force else _remembered(cache, identity)
        if digest is None and not force and _has_similar(cache, plan):
            digest = _digest(plan, progress)
            noted = may_write and _could_remember(plan, cache, identity, digest)
            if not noted and (path := _whole(plan, cache, digest)) is not None:
                log.warning(
                    "the weights were read to know that %s is their pack, and will be at each start: %s can not be "
                    "written to, where that would be remembered", path.name, cache
                )  # fmt: skip
                return path
        if not may_write:
            raise PackError(
                f"{cache} has no pack of {plan.checkpoint.name}, or a damaged one, and can not be written to; make it "
                "with `greenroom pack` where that is possible, or choose another folder with --cache-dir or "
                "GREENROOM_CACHE"
            )
        if digest is None or _whole(plan, cache, digest) is None:
            if digest is not None and (damaged := _path(cache, plan, digest)).exists():
                log.warning("the expert pack %s is damaged; it is made anew", damaged)
                damaged.unlink()  # it is of no use, and its space is needed
            digest = _write(plan, cache, progress)
            _remember(plan, cache, identity, digest)
        path = _path(cache, plan, digest)
        PackFile.open(path, _manifest(plan, digest)).close()
        return path


def _told(error: OSError) -> str:
    """The error, with the file that it concerns."""
    what = error.strerror or str(error) or type(error).__name__
    return f"{what} ({error.filename})" if error.filename else what


def _path(cache: Path, plan: ExpertPlan, digest: str) -> Path:
    dtype = str(plan.dtype).removeprefix("torch.")
    return cache / "packs" / f"{plan.checkpoint.config.model_type}-{dtype}-{digest}.pack"


def _has_similar(cache: Path, plan: ExpertPlan) -> bool:
    """Whether an existing pack could be this checkpoint's. Then the checkpoint is read first, to avoid a write."""
    for path in cache.joinpath("packs").glob(_path(cache, plan, "*").name):
        with contextlib.suppress(PackError, OSError):
            pack = PackFile.open(path)
            pack.close()
            if pack.manifest.layers == _manifest(plan, "").layers:
                return True
    return False


def _manifest(plan: ExpertPlan, digest: str) -> PackManifest:
    layers = []
    for layer in plan.layers:
        tensors = [(t.name, t.shape, str(t.dtype).removeprefix("torch.")) for t in layer.tensors]
        layers.append(PackLayer(layer.name, layer.experts, layer.top_k, RecordLayout.of(tensors)))
    return PackManifest(
        plan.checkpoint.config.model_type, str(plan.dtype).removeprefix("torch."), digest, tuple(layers)
    )


def _write(plan: ExpertPlan, cache: Path, progress: bool | None) -> str:
    """Make the pack in one pass over the weights. Returns their digest."""
    manifest = _manifest(plan, "0" * _DIGEST_LENGTH)
    folder = cache / "packs"
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < manifest.record_bytes:
        raise PackError(
            f"no room for the expert pack: it takes {format_bytes(manifest.record_bytes)} and {folder} has "
            f"{format_bytes(free)} free; free some space or choose another folder with GREENROOM_CACHE"
        )
    total = _new_digest(plan)
    with (
        PackWriter(folder / "unfinished", manifest) as writer,
        ShardReader() as reader,
        _bar("packing experts", manifest.record_bytes, progress) as bar,
    ):
        buffers: Buffers = {}
        for number, layer in enumerate(plan.layers):
            for expert in range(layer.experts):
                made: dict[str, torch.Tensor] = {}
                for recipe, weights in _stored(plan, reader, total, buffers, number, expert):
                    made |= plan.make(recipe, weights)
                writer.write(number, expert, [made[tensor.name] for tensor in layer.tensors])
                bar.update(manifest.layers[number].layout.nbytes)
        digest = str(total.hexdigest())
        writer.identify(digest, _path(cache, plan, digest))
    return digest


def _digest(plan: ExpertPlan, progress: bool | None) -> str:
    """Over the bytes of all expert tensors, and everything that determines their conversion."""
    total = _new_digest(plan)
    nbytes = sum(tensor.nbytes for tensor in plan.stored)
    with ShardReader() as reader, _bar("reading experts", nbytes, progress) as bar:
        buffers: Buffers = {}
        for number, layer in enumerate(plan.layers):
            for expert in range(layer.experts):
                for _, weights in _stored(plan, reader, total, buffers, number, expert):
                    bar.update(sum(weight.nbytes for weight in weights))
    return str(total.hexdigest())


def _new_digest(plan: ExpertPlan) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{CONVERSION_VERSION}\n{FORMAT_VERSION}\n{plan.description()}".encode())


def _stored(
    plan: ExpertPlan, reader: ShardReader, total: xxhash.xxh3_128, buffers: Buffers, number: int, expert: int
) -> Iterator[tuple[Recipe, list[torch.Tensor]]]:
    """An expert's weights as stored in the checkpoint, recipe by recipe. ``total`` digests them.

    They are in ``buffers``, and valid until the next expert is asked for.
    """
    for recipe in plan.recipes[number]:
        weights = []
        for feed in recipe.feeds:
            stored, part = feed.of(expert)
            data = buffers[recipe.target, feed.pattern] = reader.read(
                stored, part, buffers.get((recipe.target, feed.pattern))
            )
            total.update(data.numpy().data)
            weights.append(typed(data, stored, part))
        yield recipe, weights


def _identity(plan: ExpertPlan) -> str:
    """Identifies the files without reading them."""
    text = [f"{CONVERSION_VERSION} {FORMAT_VERSION}", plan.description()]
    for shard in sorted({tensor.shard for tensor in plan.stored}):
        state = shard.stat()
        text.append(f"{shard.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ino}")
    return str(xxhash.xxh3_128_hexdigest("\n".join(text).encode()))


class _Memo(msgspec.Struct, frozen=True):
    digest: str


def _remembered(cache: Path, identity: str) -> str | None:
    try:
        return msgspec.json.decode((cache / "digests" / f"{identity}.json").read_bytes(), type=_Memo).digest
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _remember(plan: ExpertPlan, cache: Path, identity: str, digest: str) -> None:
    if _identity(plan) != identity:
        _path(cache, plan, digest).unlink(missing_ok=True)
        raise CorruptCheckpoint(f"{plan.checkpoint.name} was changed while it was read; start again")
    path = cache / "digests" / f"{identity}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(_Memo(digest)))


def _could_remember(plan: ExpertPlan, cache: Path, identity: str, digest: str) -> bool:
    """Whether it may be written. Raises as ``_remember`` for other errors."""
    try:
        _remember(plan, cache, identity, digest)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
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
