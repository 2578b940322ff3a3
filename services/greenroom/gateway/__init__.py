"""The front door: OpenAI's HTTP API and a gRPC API in front of a generator."""

from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.server import Gateway

__all__ = ["Gateway", "GatewayConfig"]
