"""Calls between services: gRPC, or its in-process twin. One contract, `tests/contract/rpc`, holds for both."""

from greenroom.fabric.rpc.calls import Budget, RetryConfig, call, reading
from greenroom.fabric.rpc.dialer import Dialer, DialerConfig, GrpcDialer
from greenroom.fabric.rpc.endpoints import Endpoint, LocalEndpoint, NetworkEndpoint
from greenroom.fabric.rpc.errors import Refused, Status, as_status, retry_after_of, word_of
from greenroom.fabric.rpc.local.dialer import LocalDialer, LocalServer
from greenroom.fabric.rpc.metadata import Context, outgoing, received, value_of
from greenroom.fabric.rpc.server import Server, ServerConfig, join_address
from greenroom.fabric.rpc.tls import DialerTls, ServerTls

__all__ = [
    "Budget",
    "Context",
    "Dialer",
    "DialerConfig",
    "DialerTls",
    "Endpoint",
    "GrpcDialer",
    "LocalDialer",
    "LocalEndpoint",
    "LocalServer",
    "NetworkEndpoint",
    "Refused",
    "RetryConfig",
    "Server",
    "ServerConfig",
    "ServerTls",
    "Status",
    "as_status",
    "call",
    "join_address",
    "outgoing",
    "reading",
    "received",
    "retry_after_of",
    "value_of",
    "word_of",
]
