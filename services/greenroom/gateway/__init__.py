"""The front door: OpenAI's HTTP API in front of anything that generates."""

from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.server import Gateway

__all__ = ["Gateway", "GatewayConfig"]
