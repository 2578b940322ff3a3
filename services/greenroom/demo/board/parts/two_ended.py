"""Parts with an end at each side: resistor, capacitor, inductor, fuse, diode, LED."""

from __future__ import annotations

from typing import Final

import numpy as np

from greenroom.demo.board.canvas import Canvas, Colour, Field, intersection, union, without
from greenroom.demo.board.lettering import bitmap, random_text
from greenroom.demo.board.parts.base import BLACK, COPPER, GOLD, PRINT, SILVER, Drawing, Footprint, crack, stain
from greenroom.demo.board.surroundings import Rng, Style, jittered, pads, print_name, print_outline, shadow

_LENSES: Final[tuple[Colour, ...]] = (
    (0.93, 0.90, 0.62), (0.95, 0.55, 0.45), (0.60, 0.88, 0.60), (0.55, 0.72, 0.95), (0.93, 0.93, 0.88),
)  # fmt: skip


def _two_pads(prefix: str, reach: float, half_width: float, half_height: float, mark: bool = False) -> Footprint:
    """``reach``: how far from the middle the pads are. ``mark``: whether print shows which end is the first."""

    def draw(canvas: Canvas, style: Style, rng: Rng) -> None:
        both = union(*(canvas.box(side * reach, 0, half_width, half_height, 0.04) for side in (-1, 1)))
        pads(canvas, style, both)
        outer = half_height + 0.12
        for side in (-1, 1):
            canvas.paint(canvas.line((-0.35, side * outer), (0.35, side * outer), 0.035), style.silk, 0.85)
        if mark:
            canvas.paint(
                canvas.line((-reach - half_width - 0.08, -outer), (-reach - half_width - 0.08, outer), 0.05), style.silk
            )
        print_name(canvas, style, rng, prefix, rng.choice([-1, 1]) * (outer + 0.2))

    return draw


def _ends(canvas: Canvas, body: Field, from_x: float, colour: Colour) -> None:
    """Metal over what of the body is further out than ``from_x``."""
    outside = intersection(body, (from_x - abs(canvas.u)))
    canvas.paint(outside, colour)
    canvas.lighten(intersection(outside, abs(canvas.v + 0.12) - 0.06), 0.35, blur=0.08)


def _resistor(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """Its defect: tombstoned, it stands upright on one pad."""
    silver = jittered(rng, SILVER, 0.04)
    if defect:
        side = float(rng.choice([-1, 1]))
        body = canvas.box(side * 0.74, 0, 0.17, 0.38, 0.03)
        shadow(canvas, style, body, 0.22)
        canvas.paint(body, silver)
        canvas.lighten(canvas.box(side * 0.74, 0, 0.09, 0.26, 0.03), 0.3, blur=0.05)
        canvas.paint(canvas.box(side * 0.53, 0, 0.05, 0.36), jittered(rng, BLACK, 0.03))
        return
    body = canvas.box(0, 0, 0.78, 0.40, 0.04)
    shadow(canvas, style, body)
    canvas.paint(body, jittered(rng, BLACK, 0.04))
    _ends(canvas, body, 0.55, silver)
    canvas.stamp(bitmap(random_text(rng, "999")), 0, 0, 0.082, jittered(rng, PRINT, 0.05), 0.9)


def _capacitor(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """Its defect: a crack across."""
    body = canvas.box(0, 0, 0.76, 0.42, 0.06)
    shadow(canvas, style, body)
    tan = jittered(rng, (0.66, 0.52, 0.36), 0.06)
    canvas.paint(body, canvas.shade(tan, 0, 0, 0.8, 0.06))
    _ends(canvas, body, 0.48, jittered(rng, SILVER, 0.04))
    if defect:
        crack(canvas, rng, 0.5, 0.42, body, (0.14, 0.09, 0.06))


def _inductor(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """A coil on a drum core. Its defect: a corner of the core is broken off."""
    core = canvas.box(0, 0, 0.80, 0.76, 0.16)
    if defect:
        at_x, at_y = float(rng.choice([-1, 1])), float(rng.choice([-1, 1]))
        lost: Field = np.float32(at_x) * canvas.u + np.float32(at_y) * canvas.v - np.float32(rng.uniform(0.62, 0.86))
        rest = intersection(core, lost)
        shadow(canvas, style, rest)
        canvas.paint(intersection(core, lost - np.float32(0.16)), jittered(rng, (0.50, 0.49, 0.47), 0.05))
        core = rest
    else:
        shadow(canvas, style, core)
    grey = jittered(rng, (0.25, 0.25, 0.26), 0.05)
    canvas.paint(core, canvas.shade(grey, 0, 0, 0.9, 0.06))
    copper = jittered(rng, COPPER, 0.06)
    for radius in (0.34, 0.43, 0.52, 0.61):
        canvas.paint(intersection(canvas.ring(0, 0, radius, 0.07), core), canvas.shade(copper, 0, 0, 0.7, 0.22))
    canvas.paint(canvas.disc(0, 0, 0.30), canvas.shade(grey, 0, 0, 0.3, 0.10))
    canvas.stamp(bitmap(random_text(rng, "99")), 0, 0, 0.062, jittered(rng, PRINT, 0.05), 0.8)


def _fuse(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """A wire in a glass tube. Its defect: blown, the wire is gone and the glass is sooty."""
    body = canvas.box(0, 0, 0.95, 0.30, 0.12)
    shadow(canvas, style, body)
    canvas.paint(body, jittered(rng, (0.72, 0.78, 0.76), 0.05), 0.85)
    if defect:
        stain(canvas, rng, rng.uniform(-0.15, 0.15), 0, 0.30, (0.17, 0.12, 0.08))
        canvas.paint(canvas.line((-0.6, 0), (-0.36, 0.07), 0.05), (0.30, 0.27, 0.25))
        canvas.paint(canvas.line((0.38, -0.05), (0.6, 0), 0.05), (0.30, 0.27, 0.25))
    else:
        middle = rng.uniform(-0.07, 0.07)
        canvas.paint(canvas.path([(-0.6, 0), (0, middle), (0.6, 0)], 0.06), (0.30, 0.27, 0.25))
    canvas.lighten(canvas.line((-0.55, -0.16), (0.55, -0.16), 0.05), 0.6, blur=0.05)
    _ends(canvas, body, 0.58, jittered(rng, SILVER, 0.04))


def _diode(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """The band left marks its cathode. Its defect: burnt through."""
    leads = canvas.box(0, 0, 0.92, 0.22, 0.03)
    body = canvas.box(0, 0, 0.66, 0.46, 0.05)
    shadow(canvas, style, union(leads, body))
    canvas.paint(leads, canvas.shade(jittered(rng, SILVER, 0.04), 0, 0, 0.5, 0.1))
    canvas.paint(body, canvas.shade(jittered(rng, BLACK, 0.03), 0, 0, 0.9, 0.05))
    canvas.paint(intersection(body, canvas.box(-0.44, 0, 0.09, 0.5)), jittered(rng, (0.80, 0.80, 0.78), 0.06))
    canvas.stamp(bitmap(random_text(rng, "A9")), 0.13, 0, 0.075, jittered(rng, PRINT, 0.06), 0.6)
    if defect:
        x, y = rng.uniform(-0.05, 0.35), rng.uniform(-0.12, 0.12)
        stain(canvas, rng, x, y, 0.36, (0.40, 0.27, 0.15))
        stain(canvas, rng, x, y, 0.15, (0.82, 0.74, 0.60))


def _led(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """The green bar left marks its cathode. Its defect: the lens is burnt."""
    body = canvas.box(0, 0, 0.78, 0.44, 0.04)
    shadow(canvas, style, body)
    canvas.paint(body, jittered(rng, (0.86, 0.85, 0.80), 0.04))
    _ends(canvas, body, 0.60, jittered(rng, GOLD, 0.04))
    lens = jittered(rng, _LENSES[rng.integers(len(_LENSES))], 0.04)
    canvas.paint(canvas.box(0.06, 0, 0.44, 0.36, 0.20), canvas.shade(lens, 0.06, 0, 0.6, 0.14))
    canvas.paint(canvas.box(-0.48, 0, 0.07, 0.40), jittered(rng, (0.10, 0.42, 0.20), 0.05))
    if defect:
        stain(canvas, rng, 0.08, rng.uniform(-0.05, 0.05), 0.34, (0.13, 0.10, 0.08))
    else:
        canvas.paint(canvas.box(0.06, 0, 0.07, 0.07), (0.55, 0.45, 0.20), 0.8)
        canvas.paint(canvas.line((0.08, 0), (0.34, 0.08), 0.03), GOLD, 0.8)
        canvas.lighten(canvas.disc(-0.08, -0.14, 0.07), 0.7, blur=0.08)


def _power_pads(canvas: Canvas, style: Style, rng: Rng) -> None:
    pads(canvas, style, union(*(canvas.box(side * 0.82, 0, 0.24, 0.44, 0.04) for side in (-1, 1))))
    outline = canvas.box(0, 0, 0.98, 0.92, 0.1)
    print_outline(canvas, style, without(outline, canvas.box(0, 0, 1.2, 0.6)))
    print_name(canvas, style, rng, "L", rng.choice([-1, 1]) * 1.08)


RESISTOR: Final = Drawing(_two_pads("R", 0.82, 0.26, 0.44), _resistor)
CAPACITOR: Final = Drawing(_two_pads("C", 0.80, 0.27, 0.46), _capacitor)
INDUCTOR: Final = Drawing(_power_pads, _inductor)
FUSE: Final = Drawing(_two_pads("F", 0.86, 0.24, 0.38), _fuse)
DIODE: Final = Drawing(_two_pads("D", 0.88, 0.22, 0.34, mark=True), _diode)
LED: Final = Drawing(_two_pads("D", 0.84, 0.24, 0.46, mark=True), _led)
