"""Names and addresses that a server listens on."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to what listens on ``host``. A name other than localhost is taken for one
    that others reach."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    within = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (within or address).is_loopback
