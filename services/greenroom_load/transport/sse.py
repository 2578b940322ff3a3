"""Server-sent events out of the bytes of a stream, however they are cut."""

from __future__ import annotations

from typing import NamedTuple

_LONGEST_LINE = 16 * 1024 * 1024


class Event(NamedTuple):
    """``name`` is empty for events that have none."""

    name: bytes
    data: bytes


class LineTooLong(ValueError):
    """What comes is no event stream, or one that nobody should hold in memory."""


class SseParser:
    """Feed it what was read; it gives the events that are complete.

    Lines end in LF, CRLF or CR. Comments and fields other than ``data`` and ``event`` are passed over; an event without
    data is none.
    """

    __slots__ = ("_after_cr", "_data", "_name", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._data: list[bytes] = []
        self._name = b""

    def feed(self, read: bytes) -> list[Event]:
        """Raises LineTooLong."""
        if self._after_cr and read.startswith(b"\n"):
            read = read[1:]  # the second half of a CRLF that was cut in two
            self._after_cr = False
        if not read:
            return []
        self._after_cr = read.endswith(b"\r")
        if b"\r" in read:
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._rest + read).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LONGEST_LINE:
            raise LineTooLong(f"a line of more than {_LONGEST_LINE} bytes")
        found: list[Event] = []
        for line in lines:
            if not line:
                if data := b"\n".join(self._data):
                    found.append(Event(self._name, data))
                self._data, self._name = [], b""
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line.startswith(b"event:"):
                self._name = line[6:].strip(b" ")
        return found
