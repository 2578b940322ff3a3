"""Whether a broker is ready: it answers a metadata call."""

from __future__ import annotations

import socket
import struct


def answers(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Asks for the metadata of no topic, and wants at least one broker in the answer."""
    client = b"probe"
    # Metadata version 4: api key, version, correlation id, client id; no topics, no creation.
    request = struct.pack(">hhih", 3, 4, 1, len(client)) + client + struct.pack(">i?", 0, False)
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(struct.pack(">i", len(request)) + request)
            (size,) = struct.unpack(">i", _read(connection, 4))
            answer = _read(connection, size)
    except (OSError, EOFError):
        return False
    correlation, _throttled_ms, brokers = struct.unpack_from(">iii", answer)
    return bool(correlation == 1 and brokers > 0)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
