"""What the settings of several quantisation methods have in common. They are untrusted JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.moe.formats.stored_matrix import NotServed


def need_4_bits(bits: object) -> None:
    """``bits``: what the settings have under that name. Raises NotServed for others, and where they have nothing."""
    if bits is None:
        raise NotServed("its settings have no bits: what is served of this method has 4")
    if bits != 4:
        raise NotServed(f"its codes have {bits} bits: what is served of this method has 4")


def group_size(settings: Mapping[str, Any]) -> int:
    """-1: all inputs. Raises NotServed for what is no size."""
    size = settings.get("group_size")
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise NotServed(f"its group_size is {size!r}: what is served is a number of inputs, or -1 for all of them")
    return size


def names(listed: object) -> list[str]:
    """The modules that a setting names: none, one, or a list."""
    if listed is None:
        return []
    return [str(one) for one in listed] if isinstance(listed, list | tuple) else [str(listed)]


def rules(settings: object) -> list[str]:
    """The patterns of modules that have settings of their own; empty where there are none."""
    return [str(one) for one in settings] if isinstance(settings, Mapping) else []
