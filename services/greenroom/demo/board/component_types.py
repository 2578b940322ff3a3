"""The types of components on the board: what each may be found to be, and by which values a request names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from greenroom.demo.board.parts import large, packages, two_ended
from greenroom.demo.board.parts.base import Drawing

GOOD: Final = "good"
MISSING: Final = "missing"
SHIFTED: Final = "shifted"
RIGHT: Final = "right"
ORIENTATIONS: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {RIGHT: (0.0,), "turned": (90.0, 270.0), "reversed": (180.0,)}
)
"""By the label of an orientation, how many degrees a part may be turned."""


@dataclass(frozen=True, slots=True)
class ComponentType:
    """``labels``: what its expert tells apart, ``good`` first; one that is not common to types is a defect it draws.
    ``orientation``: the shared expert that a good one goes on to; None: it may lie either way. ``values``: by each name
    that a bill of materials has for it, how many of these are on the board. ``good``: the share that passes.
    """

    name: str
    drawing: Drawing = field(compare=False)
    labels: tuple[str, ...]
    values: Mapping[str, int]
    good: float
    orientation: str | None = None


def _type(
    name: str, drawing: Drawing, labels: str, values: Mapping[str, int], good: float, orientation: str | None = None
) -> ComponentType:
    return ComponentType(name, drawing, (GOOD, *labels.split()), MappingProxyType(dict(values)), good, orientation)


POLARITY: Final = "polarity"
FIRST_PIN: Final = "first_pin"
KEYING: Final = "keying"
SHARED: Final = (POLARITY, FIRST_PIN, KEYING)
"""Experts that several types have in common. Each tells the ``ORIENTATIONS`` apart."""

TYPES: Final[tuple[ComponentType, ...]] = (
    _type("resistor", two_ended.RESISTOR, "missing shifted tombstoned", {"R0402": 118, "R0603": 64, "R0805": 22}, 0.95),
    _type("capacitor", two_ended.CAPACITOR, "missing shifted cracked", {"C0402": 96, "C0603": 58, "C0805": 17}, 0.95),
    _type("electrolytic", large.ELECTROLYTIC, "missing shifted burst", {"CE10U": 9, "CE100U": 6}, 0.92, POLARITY),
    _type("diode", two_ended.DIODE, "missing shifted burnt", {"D1N4148": 14, "DSS34": 6}, 0.93, POLARITY),
    _type("led", two_ended.LED, "missing shifted burnt", {"LEDRED": 5, "LEDGRN": 7}, 0.93, POLARITY),
    _type("sot23", packages.SOT23, "missing shifted bridged", {"Q2N7002": 15, "QBC847": 8}, 0.92, FIRST_PIN),
    _type("soic8", packages.SOIC8, "missing bridged lifted", {"ULM358": 6, "U24LC256": 3}, 0.90, FIRST_PIN),
    _type("qfp", packages.QFP, "missing bridged lifted", {"USTM32": 1, "UFT2232": 1}, 0.88, FIRST_PIN),
    _type("qfn", packages.QFN, "missing shifted bridged", {"UTPS62130": 4, "UCP2102": 1}, 0.90, FIRST_PIN),
    _type("crystal", large.CRYSTAL, "missing shifted dented", {"Y8M": 1, "Y32K": 1}, 0.95),
    _type("inductor", two_ended.INDUCTOR, "missing shifted chipped", {"L2U2": 6, "L10U": 5}, 0.94),
    _type("connector", large.CONNECTOR, "missing bent", {"JXH4": 5, "JPH4": 4}, 0.91, KEYING),
    _type("fuse", two_ended.FUSE, "missing shifted blown", {"F500MA": 2, "F2A": 2}, 0.94),
    _type("switch", large.SWITCH, "missing shifted broken", {"SWTACT6": 4}, 0.95),
    _type("relay", large.RELAY, "missing cracked", {"KG5V": 3}, 0.94, KEYING),
    _type("transformer", large.TRANSFORMER, "missing shifted loose", {"TEP13": 1, "TEE16": 1}, 0.93, KEYING),
)
