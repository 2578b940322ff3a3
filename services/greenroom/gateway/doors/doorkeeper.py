"""Who calls: the key of a request, looked up in a file that may change at any time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from greenroom.core.errors import InvalidConfig
from greenroom.gateway.doors.keys import MAX_PRIORITY, Key, KeyLimits, read_keys, recognise
from greenroom.gateway.errors import ApiError

_LOG = logging.getLogger(__name__)
LOOK_AGAIN_S = 1.0
"""How often the file is looked at. A revoked key may be taken for so long."""
_Mark = tuple[int, int, int]
_NO_LIMITS = KeyLimits(max_priority=MAX_PRIORITY)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. ``name``: the key's; empty where keys are off."""

    name: str = ""
    limits: KeyLimits = _NO_LIMITS


ANYONE = Caller()


class Doorkeeper:
    """Recognises callers by the keys in the file ``path``. Without a file every caller is ``ANYONE``.

    The file is read at construction, which raises InvalidConfig, and again whenever it has changed. If it can not be
    read then, the keys stay as they were and the log says so: a slip of an editor must not lock everybody out.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._keys: dict[str, Key] = {}
        self._mark: _Mark | None = None
        self._looked = float("-inf")
        if path is not None:
            self._mark = _mark(path)
            self._keys = read_keys(path).live()
            if not self._keys:
                _LOG.warning("%s has no key in use: every request will be refused", path)

    @property
    def asks(self) -> bool:
        """Whether a key is needed."""
        return self._path is not None

    def admit(self, authorization: str | None, now: float) -> Caller:
        """The caller, by the header ``Authorization``. ``now``: monotonic, in seconds. Raises ApiError (401)."""
        if self._path is None:
            return ANYONE
        if now - self._looked >= LOOK_AGAIN_S:
            self._looked = now
            self._look(self._path)
        if not authorization:
            raise _refused("send your API key as the header Authorization: Bearer KEY", "missing_api_key")
        scheme, _, text = authorization.partition(" ")
        key = recognise(self._keys, text.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise _refused(
                "this API key is not known here, or was revoked; send a valid one as Authorization: Bearer KEY",
                "invalid_api_key",
                {"WWW-Authenticate": 'Bearer realm="greenroom", error="invalid_token"'},
            )
        return Caller(key.name, key.limits)

    def _look(self, path: Path) -> None:
        mark = _mark(path)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._keys = read_keys(path).live()
            _LOG.info("read %d keys in use from %s", len(self._keys), path)
        except InvalidConfig as error:
            _LOG.error("%s; the keys read before stay in use", error)


def _mark(path: Path) -> _Mark | None:
    """A value that changes when the file does. None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _refused(message: str, code: str, headers: Mapping[str, str] | None = None) -> ApiError:
    return ApiError(401, message, code=code, headers=headers or {"WWW-Authenticate": 'Bearer realm="greenroom"'})
