"""How requests reach a server: one interface, HTTP and gRPC behind it."""

from greenroom_load.transport.base import Prepared, Style, Transport
from greenroom_load.transport.choose import transport_for

__all__ = ["Prepared", "Style", "Transport", "transport_for"]
