"""API keys: how they are made, kept in a file, and recognised.

A key is 32 random bytes behind a public id. The file holds SHA-256 of it and not the key. A slow hash, as passwords
need, would add nothing: nobody can try 2^256 keys, and every request would pay for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from greenroom.core.errors import InvalidConfig

MAX_PRIORITY = 100
MAX_FILE_BYTES = 4 * 1024 * 1024
_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_KEY = re.compile(r"grk_([a-z2-7]{12})_[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOBODY = hashlib.sha256(b"no key has this").hexdigest()


class KeyLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a key may do. None: no limit beyond the server's own.

    A request has ``n`` times its prompts of sequences. ``rate_per_minute``: so many sequences at once, and then so many
    a minute. ``max_concurrent``: sequences that are answered or generated at once. ``token_limit``: tokens of one
    request, of its prompts and its answers together. ``max_priority``: the highest that a request may ask for.
    """

    rate_per_minute: Annotated[float, Meta(gt=0)] | None = None
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    token_limit: Annotated[int, Meta(ge=2)] | None = None
    max_priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0

    def __post_init__(self) -> None:
        """Checks values that did not come out of a file. Raises InvalidConfig."""
        if self.rate_per_minute is not None and not 0 < self.rate_per_minute < float("inf"):
            raise InvalidConfig("rate_limit", self.rate_per_minute, "it is a number of sequences a minute above 0")
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise InvalidConfig("max_concurrent", self.max_concurrent, "it is a number from 1")
        if self.token_limit is not None and self.token_limit < 2:
            raise InvalidConfig("token_limit", self.token_limit, "it is a number from 2: a prompt and an answer")
        if not -MAX_PRIORITY <= self.max_priority <= MAX_PRIORITY:
            raise InvalidConfig("max_priority", self.max_priority, f"it is from -{MAX_PRIORITY} to {MAX_PRIORITY}")


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. ``name``: its owner's. Requests, limits and idempotency keys belong to the name, not to the key."""

    id: Annotated[str, Meta(pattern=r"\A[a-z2-7]{12}\Z")]
    name: Annotated[str, Meta(pattern=rf"\A{_NAME.pattern}\Z")]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    created: datetime
    revoked: datetime | None = None
    limits: KeyLimits = KeyLimits()


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds. Immutable: a change gives a new one."""

    version: Literal[1] = 1
    keys: tuple[Key, ...] = ()

    def live(self) -> dict[str, Key]:
        """The keys that are not revoked, by their ids."""
        return {key.id: key for key in self.keys if key.revoked is None}

    def add(self, key: Key) -> KeyFile:
        """Raises InvalidConfig where a live key has the name."""
        if any(other.name == key.name for other in self.live().values()):
            raise InvalidConfig("name", key.name, "a key of that name is in use; revoke it first or take another name")
        return KeyFile(keys=(*self.keys, key))

    def revoke(self, name: str, now: datetime) -> KeyFile:
        """Raises InvalidConfig where no live key has the name."""
        live = {key.name for key in self.live().values()}
        if name not in live:
            raise InvalidConfig("name", name, f"names of keys in use: {', '.join(sorted(live)) or 'none'}")
        return KeyFile(
            keys=tuple(
                msgspec.structs.replace(key, revoked=now) if key.name == name and key.revoked is None else key
                for key in self.keys
            )
        )


def new_key(name: str, limits: KeyLimits, now: datetime) -> tuple[Key, str]:
    """A key, and the text that its owner sends. The text is kept nowhere. Raises InvalidConfig for a bad name."""
    if not _NAME.fullmatch(name):
        raise InvalidConfig("name", name, "it takes 1 to 64 letters, digits, '.', '_' and '-', no sign first")
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(12))
    text = f"grk_{key_id}_{secrets.token_urlsafe(32)}"
    return Key(id=key_id, name=name, sha256=_digest(text), created=now, limits=limits), text


def recognise(live: dict[str, Key], text: str) -> Key | None:
    """The live key that ``text`` is, None if it is none of them.

    The id is public, so it is looked up. The rest is compared by its hash, in a time that does not depend on it.
    """
    match = _KEY.fullmatch(text)
    key = live.get(match[1]) if match else None
    same = hmac.compare_digest(_digest(text), _NOBODY if key is None else key.sha256)
    return key if same else None


def read_keys(path: Path) -> KeyFile:
    """Raises InvalidConfig, saying what is wrong with the file and what to do."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        make = f"make one with: greenroom keys add NAME --keys-file {path}"
        raise InvalidConfig("keys_file", str(path), f"it can not be read ({error.strerror}); {make}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidConfig("keys_file", str(path), f"it has more than {MAX_FILE_BYTES} bytes; remove revoked keys")
    try:
        return msgspec.json.decode(raw, type=KeyFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidConfig) as error:
        raise InvalidConfig("keys_file", str(path), f"it is no file of keys: {error}") from error


def write_keys(path: Path, keys: KeyFile) -> None:
    """Replaces the file at once: a reader sees the old one or the new one. Only its owner may read it."""
    text = msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n"
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # made with 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def changing(path: Path) -> Iterator[KeyFile]:
    """The file's keys, none where there is no file yet. While the context is open no other command changes the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InvalidConfig("keys_file", str(path), f"it can not be written ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield read_keys(path) if path.exists() else KeyFile()
    except OSError as error:
        raise InvalidConfig("keys_file", str(path), f"it can not be written ({error.strerror})") from error
    finally:
        os.close(lock)


def utc_now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
