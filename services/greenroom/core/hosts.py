"""Names and addresses that a server listens on."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a server on ``host``. Any name other than localhost counts as one that
    other machines reach."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    within = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (within or address).is_loopback
