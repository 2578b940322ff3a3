"""Where artifacts are kept: files that are whole or not there, or their twin in memory.

Everything here may block: call it from a thread, one call at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Generic, Protocol

import xxhash

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.core.files import PARTIAL, write_whole
from greenroom.core.tensors import Damaged
from greenroom.predictor.versions.artifact import A, ArtifactInfo, Codec

_LOG = logging.getLogger(__name__)
_FILE = re.compile(r"(\d{12})-([0-9a-f]{32})\.safetensors")
_PIN = "serving.json"


class NotKept(GreenroomError):
    """A version that is not kept, or can not be read any more."""


class VersionStore(Protocol[A]):
    """Versions of one kind by model: the last ``keep`` of each, the pinned one, and the newest that is not withheld."""

    codec: Codec[A]

    def open(self) -> list[A]:
        """The newest version of each model that can be read. To be called once, first. Raises InvalidConfig."""
        ...

    def close(self) -> None: ...

    def versions(self, model: str) -> list[ArtifactInfo]:
        """What is kept, oldest first. Does not block."""
        ...

    def next_version(self, model: str) -> int:
        """Higher than any that the model ever had here. Does not block."""
        ...

    def pinned(self, model: str) -> int | None:
        """The version that was pinned and is kept. Does not block."""
        ...

    def write(self, artifact: A, /) -> ArtifactInfo:
        """Keep ``artifact``, for good when this returns. Raises OSError; then nothing has changed."""
        ...

    def read(self, model: str, version: int) -> bytes:
        """The file as it was written. Raises NotKept."""
        ...

    def pin(self, model: str, version: int | None) -> None:
        """Remember what is to be served; None: the newest. Raises NotKept, OSError."""
        ...

    def forget(self, model: str) -> None:
        """Delete all of it. Raises OSError."""
        ...


class MemoryStore(Generic[A]):
    """The twin: kept until this process ends."""

    def __init__(self, keep: int, codec: Codec[A]) -> None:
        self.codec = codec
        self._keep = keep
        self._files: dict[str, dict[int, tuple[ArtifactInfo, bytes]]] = {}
        self._pins: dict[str, int] = {}

    def open(self) -> list[A]:
        return [self.codec.load(files[max(files)][1]) for files in self._files.values() if files]

    def close(self) -> None:
        pass

    def versions(self, model: str) -> list[ArtifactInfo]:
        return [info for info, _ in self._files.get(model, {}).values()]

    def next_version(self, model: str) -> int:
        return max(self._files.get(model, {}), default=0) + 1

    def pinned(self, model: str) -> int | None:
        return self._pins.get(model)

    def write(self, artifact: A, /) -> ArtifactInfo:
        data = self.codec.dump(artifact)
        info = self.codec.info(artifact, len(data))
        files = self._files.setdefault(artifact.model, {})
        files[artifact.version] = (info, data)
        infos = {version: info for version, (info, _) in files.items()}
        for version in _superfluous(infos, self._keep, self.pinned(artifact.model)):
            del files[version]
        return info

    def read(self, model: str, version: int) -> bytes:
        try:
            return self._files[model][version][1]
        except KeyError:
            raise _not_kept(model, version, self._files.get(model, {})) from None

    def pin(self, model: str, version: int | None) -> None:
        if version is None:
            self._pins.pop(model, None)
            return
        self.read(model, version)
        self._pins[model] = version

    def forget(self, model: str) -> None:
        self._files.pop(model, None)
        self._pins.pop(model, None)


class FileStore(Generic[A]):
    """A folder a model, a file a version: ``000000000012-<xxh3 of the file>.safetensors``.

    A file is written beside its place, flushed to the disk and then renamed, so it is whole or not there; its name
    holds its checksum, so damage that comes later is found. ``serving.json`` names the version that is pinned. One
    process at a time: each kind has a lock in the state folder. ``within``: the folder for the files inside each
    model's folder; "": the model's folder itself.
    """

    def __init__(self, folder: Path, keep: int, codec: Codec[A], *, within: str = "") -> None:
        self.codec = codec
        self._folder = folder
        self._within = within
        self._keep = keep
        self._lock: IO[bytes] | None = None
        self._files: dict[str, dict[int, ArtifactInfo]] = {}
        self._paths: dict[tuple[str, int], Path] = {}
        self._highest: dict[str, int] = {}
        self._pins: dict[str, int] = {}

    def open(self) -> list[A]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / ("lock" if not self._within else f"lock-{self._within}")).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folders = [path / self._within for path in sorted(self._folder.iterdir())]
            newest = [self._open_model(path) for path in folders if path.is_dir()]
        except BlockingIOError:
            self.close()
            allowed = "another predictor uses it; give each its own"
            raise InvalidConfig("state_dir", str(self._folder), allowed) from None
        except OSError as error:
            self.close()
            allowed = f"it must be a folder that can be written: {error.strerror}"
            raise InvalidConfig("state_dir", str(self._folder), allowed) from error
        return [artifact for artifact in newest if artifact is not None]

    def _open_model(self, folder: Path) -> A | None:
        newest: A | None = None
        highest = 0
        for path in sorted(folder.iterdir()):
            matched = _FILE.fullmatch(path.name)
            if path.name.endswith(PARTIAL):
                path.unlink()
            if matched is None:
                continue
            highest = max(highest, int(matched[1]))
            try:
                artifact = self.codec.load(_read_whole(path))
                if artifact.version != int(matched[1]) or self._folder_of(artifact.model) != folder:
                    raise Damaged("it stands under another name")
            except (Damaged, OSError) as error:
                _LOG.warning("the artifact %s is passed over, it can not be used: %s", path, error)
                continue
            self._add(self.codec.info(artifact, path.stat().st_size), path)
            newest = artifact
        if newest is not None:
            self._highest[newest.model] = highest
            self._read_pin(newest.model, folder / _PIN)
        return newest

    def _read_pin(self, model: str, path: Path) -> None:
        try:
            version = int(json.loads(path.read_bytes())["version"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("%s is passed over, the newest version is served: %r", path, error)
            return
        if version in self._files[model]:
            self._pins[model] = version
        else:
            _LOG.warning("version %d of %r was pinned and is not there: the newest is served", version, model)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def versions(self, model: str) -> list[ArtifactInfo]:
        return [info for _, info in sorted(self._files.get(model, {}).items())]

    def next_version(self, model: str) -> int:
        return self._highest.get(model, 0) + 1

    def pinned(self, model: str) -> int | None:
        return self._pins.get(model)

    def write(self, artifact: A, /) -> ArtifactInfo:
        data = self.codec.dump(artifact)
        model, version = artifact.model, artifact.version
        folder = self._folder_of(model)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{version:012d}-{xxhash.xxh3_128_hexdigest(data)}.safetensors"
        write_whole(path, data, durable=True)
        info = self.codec.info(artifact, len(data))
        self._add(info, path)
        self._highest[model] = max(version, self._highest.get(model, 0))
        files = self._files[model]
        for old in _superfluous(files, self._keep, self.pinned(model)):
            del files[old]
            self._paths.pop((model, old)).unlink(missing_ok=True)
        self._remove_damaged(folder, min(files))
        return info

    def _add(self, info: ArtifactInfo, path: Path) -> None:
        self._files.setdefault(info.model, {})[info.version] = info
        self._paths[info.model, info.version] = path

    def _remove_damaged(self, folder: Path, oldest: int) -> None:
        for path in folder.iterdir():
            matched = _FILE.fullmatch(path.name)
            if matched is not None and int(matched[1]) < oldest:
                path.unlink(missing_ok=True)

    def read(self, model: str, version: int) -> bytes:
        path = self._paths.get((model, version))
        if path is None:
            raise _not_kept(model, version, self._files.get(model, {}))
        try:
            return _read_whole(path)
        except (Damaged, OSError) as error:
            _LOG.warning("the artifact %s can not be used any more: %s", path, error)
            del self._paths[model, version], self._files[model][version]
            if self._pins.get(model) == version:
                del self._pins[model]
            raise _not_kept(model, version, self._files[model]) from error

    def pin(self, model: str, version: int | None) -> None:
        path = self._folder_of(model) / _PIN
        if version is None:
            path.unlink(missing_ok=True)
            self._pins.pop(model, None)
            return
        self.read(model, version)
        write_whole(path, json.dumps({"version": version}).encode(), durable=True)
        self._pins[model] = version

    def forget(self, model: str) -> None:
        folder = self._folder_of(model)
        if folder.exists():
            shutil.rmtree(folder)
        for version in self._files.pop(model, {}):
            del self._paths[model, version]
        self._pins.pop(model, None)
        self._highest.pop(model, None)

    def _folder_of(self, model: str) -> Path:
        """A name that any file system takes, and no two models share."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")[:48]
        digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return self._folder / f"{readable}-{digest}" / self._within


def store_of(codec: Codec[A], state_dir: Path | None, keep: int, *, within: str = "") -> VersionStore[A]:
    """``state_dir`` None: in memory. ``within``: see FileStore."""
    return MemoryStore(keep, codec) if state_dir is None else FileStore(state_dir, keep, codec, within=within)


def _superfluous(infos: Mapping[int, ArtifactInfo], keep: int, pinned: int | None) -> list[int]:
    served = max((version for version, info in infos.items() if not info.withheld), default=None)
    return [version for version in sorted(infos)[:-keep] if version not in (pinned, served)]


def _not_kept(model: str, version: int, files: Mapping[int, object]) -> NotKept:
    kept = ", ".join(map(str, sorted(files))) or "none"
    return NotKept(f"version {version} of the model {model!r:.100} is not kept; kept: {kept}")


def _read_whole(path: Path) -> bytes:
    data = path.read_bytes()
    matched = _FILE.fullmatch(path.name)
    if matched is None or xxhash.xxh3_128_hexdigest(data) != matched[2]:
        raise Damaged("its checksum is not that of its name")
    return data
