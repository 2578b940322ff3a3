"""Larger parts: electrolytic capacitor, crystal, connector, switch, relay, transformer."""

from __future__ import annotations

from math import cos, pi, sin
from typing import Final

from greenroom.demo.board.canvas import Canvas, Colour, intersection, union, without
from greenroom.demo.board.lettering import bitmap, random_text
from greenroom.demo.board.parts.base import BLACK, COPPER, GOLD, SILVER, Drawing, crack, stain
from greenroom.demo.board.surroundings import Rng, Style, jittered, pads, print_name, print_outline, shadow

_BUTTONS: Final[tuple[Colour, ...]] = ((0.12, 0.12, 0.13), (0.75, 0.16, 0.14), (0.86, 0.74, 0.20), (0.18, 0.35, 0.65))
_RELAYS: Final[tuple[Colour, ...]] = ((0.14, 0.33, 0.62), (0.13, 0.13, 0.14), (0.80, 0.45, 0.14))
_PINS: Final = 4
_PIN_PITCH: Final = 0.42


# --- electrolytic capacitor, seen from above


def _can_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    pads(canvas, style, union(*(canvas.box(side * 0.78, 0, 0.30, 0.20, 0.04) for side in (-1, 1))))
    outline = canvas.box(0, 0, 0.98, 0.98, 0.05)
    print_outline(canvas, style, without(outline, canvas.box(0, 0, 1.3, 0.36)))
    plus = union(canvas.line((0.86, -0.98), (1.10, -0.98), 0.05), canvas.line((0.98, -1.10), (0.98, -0.86), 0.05))
    canvas.paint(plus, style.silk)


def _electrolytic(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """The dark segment left marks the minus; the base has its corners cut at the plus. Its defect: burst."""
    base = canvas.convex([(-0.86, -0.86), (0.52, -0.86), (0.86, -0.52), (0.86, 0.52), (0.52, 0.86), (-0.86, 0.86)])
    shadow(canvas, style, base, 0.12)
    canvas.paint(base, jittered(rng, (0.16, 0.16, 0.17), 0.04))
    can = canvas.disc(0, 0, 0.78)
    canvas.paint(can, canvas.shade(jittered(rng, (0.72, 0.73, 0.75), 0.05), 0, 0, 1.0, 0.16))
    canvas.lighten(canvas.ring(0, 0, 0.72, 0.05), 0.25, blur=0.03)
    canvas.paint(intersection(canvas.disc(0, 0, 0.70), canvas.u + 0.36), jittered(rng, (0.13, 0.13, 0.20), 0.05))
    ink = jittered(rng, (0.20, 0.20, 0.26), 0.05)
    for place, pattern in enumerate(("99", "99A")):
        canvas.stamp(bitmap(random_text(rng, pattern)), 0.16, (place - 0.5) * 0.42, 0.060, ink, 0.8)
    if defect is not None:
        turn = rng.uniform(0, pi)
        for angle in (turn, turn + pi / 3, turn + 2 * pi / 3):
            end = (cos(angle) * 0.5, sin(angle) * 0.5)
            canvas.paint(canvas.line((-end[0], -end[1]), end, 0.10), (0.25, 0.16, 0.08))
        stain(canvas, rng, 0, 0, 0.40, (0.45, 0.28, 0.12), 0.8)


# --- crystal in a metal can


def _crystal_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    pads(canvas, style, union(*(canvas.box(side * 0.72, 0, 0.40, 0.18, 0.04) for side in (-1, 1))))
    outline = canvas.box(0, 0, 1.12, 0.62, 0.12)
    print_outline(canvas, style, without(outline, canvas.box(0, 0, 1.3, 0.3)))
    print_name(canvas, style, rng, "Y", rng.choice([-1, 1]) * 0.92)


def _crystal(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """Its defect: a dent."""
    rim = canvas.box(0, 0, 1.00, 0.50, 0.48)
    shadow(canvas, style, rim, 0.10)
    grey = jittered(rng, (0.66, 0.66, 0.65), 0.05)
    canvas.paint(rim, grey)
    top = canvas.box(0, 0, 0.86, 0.38, 0.36)
    canvas.lighten(top - 0.03, -0.25)
    canvas.paint(top, canvas.shade((grey[0] + 0.12, grey[1] + 0.12, grey[2] + 0.12), 0, 0, 0.9, 0.10))
    canvas.stamp(bitmap(random_text(rng, "99A99")), 0, 0, 0.066, (0.30, 0.30, 0.31), 0.75)
    if defect is not None:
        x, y = rng.uniform(-0.5, 0.5), rng.uniform(-0.12, 0.12)
        canvas.lighten(canvas.box(x, y, 0.20, 0.15, 0.15), -0.6, blur=0.12)
        canvas.lighten(canvas.line((x - 0.06, y + 0.15), (x + 0.16, y + 0.09), 0.06), 0.75, blur=0.05)


# --- connector with a row of pins, keyed below


def _connector_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    for place in range(_PINS):
        x = (place - (_PINS - 1) / 2) * _PIN_PITCH
        pads(canvas, style, canvas.box(x, 0, 0.15, 0.15, 0.0) if place == 0 else canvas.disc(x, 0, 0.16))
        canvas.paint(canvas.disc(x, 0, 0.075), (0.05, 0.05, 0.05))
    print_outline(canvas, style, canvas.box(0, 0, 1.10, 0.76))
    print_name(canvas, style, rng, "CN", -0.98)


def _connector(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """Its latch is below. Its defect: a pin is bent."""
    housing = canvas.box(0, 0, 1.02, 0.62, 0.05)
    shadow(canvas, style, housing, 0.10)
    ivory = jittered(rng, (0.88, 0.86, 0.77), 0.05)
    canvas.paint(housing, ivory)
    canvas.lighten(canvas.box(0, 0.01, 0.88, 0.44, 0.03), -0.28, blur=0.03)
    floor: Colour = (ivory[0] * 0.55, ivory[1] * 0.54, ivory[2] * 0.52)
    canvas.paint(canvas.box(0, 0.03, 0.84, 0.38, 0.03), floor)
    canvas.paint(union(*(canvas.box(side * 0.50, 0.56, 0.13, 0.14) for side in (-1, 1))), style.mask)
    canvas.lighten(canvas.box(0, 0.52, 0.30, 0.06), -0.30)
    bent = int(rng.integers(_PINS)) if defect is not None else None
    metal = jittered(rng, GOLD if rng.random() < 0.6 else SILVER, 0.04)
    for place in range(_PINS):
        x = (place - (_PINS - 1) / 2) * _PIN_PITCH
        if place == bent:
            tip = (x + rng.choice([-1, 1]) * rng.uniform(0.20, 0.28), rng.choice([-1, 1]) * rng.uniform(0.16, 0.30))
            canvas.lighten(canvas.line((x + 0.04, 0.05), (tip[0] + 0.04, tip[1] + 0.05), 0.19), -0.6)
            canvas.paint(canvas.line((x, 0), tip, 0.15), metal)
            canvas.lighten(canvas.disc(*tip, 0.06), 0.6)
            continue
        canvas.lighten(canvas.box(x + 0.03, 0.03, 0.11, 0.11), -0.5)
        canvas.paint(canvas.box(x, 0, 0.09, 0.09), metal)
        canvas.lighten(canvas.box(x - 0.02, -0.02, 0.03, 0.03), 0.6)


# --- push-button switch


def _switch_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    pads(canvas, style, canvas.comb(0, -0.55, 0.24, 0.15, 1.84, 2).clip(max=canvas.comb(0, 0.55, 0.24, 0.15, 1.84, 2)))
    outline = canvas.box(0, 0, 0.86, 0.90)
    print_outline(canvas, style, without(outline, canvas.box(0, 0, 1.3, 0.76)))
    print_name(canvas, style, rng, "S", rng.choice([-1, 1]) * 1.08)


def _switch(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """Its defect: the button has broken off."""
    leads = canvas.comb(0, -0.55, 0.20, 0.10, 1.70, 2).clip(max=canvas.comb(0, 0.55, 0.20, 0.10, 1.70, 2))
    body = canvas.box(0, 0, 0.80, 0.80, 0.06)
    shadow(canvas, style, union(body, leads), 0.09)
    canvas.paint(leads, jittered(rng, SILVER, 0.04))
    canvas.paint(body, jittered(rng, BLACK, 0.03))
    cover = canvas.box(0, 0, 0.72, 0.72, 0.05)
    canvas.paint(cover, canvas.shade(jittered(rng, (0.70, 0.71, 0.72), 0.05), 0, 0, 1.0, 0.12))
    for x in (-1, 1):
        for y in (-1, 1):
            canvas.paint(canvas.disc(x * 0.56, y * 0.56, 0.09), (0.16, 0.16, 0.17))
    colour = jittered(rng, _BUTTONS[rng.integers(len(_BUTTONS))], 0.04)
    if defect is None:
        canvas.lighten(canvas.disc(0.05, 0.05, 0.46), -0.45, blur=0.06)
        canvas.paint(canvas.disc(0, 0, 0.40), canvas.shade(colour, 0, 0, 0.5, 0.12))
        canvas.lighten(canvas.ring(0, 0, 0.36, 0.04), 0.2, blur=0.03)
        return
    canvas.paint(canvas.disc(0, 0, 0.42), (0.05, 0.05, 0.05))
    rest = intersection(canvas.disc(0, 0, 0.40), canvas.u * sin(turn := rng.uniform(0, 2 * pi)) + canvas.v * cos(turn))
    canvas.paint(rest + 0.14, colour)
    canvas.paint(canvas.disc(0, 0, 0.12), (0.72, 0.60, 0.30), 0.9)


# --- relay


def _relay_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    holes = [(-0.80, -0.42), (-0.80, 0.42), (0.30, -0.42), (0.30, 0.42), (0.84, 0.0)]
    pads(canvas, style, union(*(canvas.disc(x, y, 0.17) for x, y in holes)))
    for x, y in holes:
        canvas.paint(canvas.disc(x, y, 0.08), (0.05, 0.05, 0.05))
    print_outline(canvas, style, canvas.box(0, 0, 1.10, 0.80))
    print_name(canvas, style, rng, "K", rng.choice([-1, 1]) * 1.02)


def _relay(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """The stripe left marks its coil. Its defect: the case is cracked."""
    case = canvas.box(0, 0, 1.04, 0.72, 0.06)
    shadow(canvas, style, case, 0.14)
    colour = jittered(rng, _RELAYS[rng.integers(len(_RELAYS))], 0.04)
    canvas.paint(case, canvas.shade(colour, 0, 0, 1.2, 0.07))
    canvas.lighten(without(case, case + 0.07), 0.12)
    ink: Colour = (0.86, 0.87, 0.86)
    canvas.paint(canvas.box(-0.82, 0, 0.06, 0.54), ink, 0.9)
    for place, pattern in enumerate(("AA9A", "99U99")):
        canvas.stamp(bitmap(random_text(rng, pattern)), 0.12, (place - 0.5) * 0.50, 0.066, ink, 0.8)
    if defect is not None:
        crack(canvas, rng, 0.9, 0.72, case, (0.03, 0.03, 0.03), width=1.7)


# --- transformer: a coil in a core of two halves


def _transformer_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    sides = union(*(canvas.comb(0, side * 0.92, 0.13, 0.16, 0.50, 4) for side in (-1, 1)))
    pads(canvas, style, sides)
    print_outline(canvas, style, canvas.box(0, 0, 1.10, 0.68))
    canvas.paint(canvas.disc(-1.04, -0.94, 0.06), style.silk)


def _transformer(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """The dot above left marks its first pin. Its defect: a winding has come loose."""
    pins = union(*(canvas.comb(0, side * 0.86, 0.08, 0.16, 0.50, 4) for side in (-1, 1)))
    bobbin, core = canvas.box(0, 0, 0.92, 0.80, 0.03), canvas.box(0, 0, 1.04, 0.52, 0.05)
    shadow(canvas, style, union(bobbin, core, pins), 0.12)
    canvas.paint(pins, jittered(rng, SILVER, 0.04))
    canvas.paint(bobbin, jittered(rng, (0.17, 0.16, 0.16), 0.03))
    canvas.paint(core, canvas.shade(jittered(rng, (0.34, 0.34, 0.35), 0.04), 0, 0, 1.2, 0.08))
    copper = jittered(rng, COPPER, 0.05)
    canvas.paint(canvas.box(0, 0, 0.60, 0.62, 0.08), canvas.shade(copper, 0, 0, 0.9, 0.15))
    canvas.lighten(canvas.comb(0, 0, 0.018, 0.62, 0.10, 12), -0.30)
    tape = jittered(rng, (0.86, 0.76, 0.28), 0.06)
    canvas.paint(canvas.box(0, 0, 0.62, 0.34), tape, 0.96)
    canvas.stamp(bitmap(random_text(rng, "A99")), 0, 0, 0.066, (0.22, 0.18, 0.08), 0.8)
    canvas.paint(canvas.disc(-0.76, -0.64, 0.10), (0.92, 0.92, 0.90))
    if defect is not None:
        side, x = float(rng.choice([-1, 1])), rng.uniform(-0.35, 0.1)
        points = [(x, side * 0.30), (x + 0.15, side * 0.75), (x + 0.42, side * 1.05), (x + 0.62, side * 0.66)]
        points.append((x + 0.34, side * 0.40))
        canvas.lighten(canvas.path([(one + 0.04, other + 0.05) for one, other in points], 0.10), -0.45, blur=0.04)
        canvas.paint(canvas.path(points, 0.085), (copper[0] + 0.14, copper[1] + 0.12, copper[2] + 0.05))


ELECTROLYTIC: Final = Drawing(_can_footprint, _electrolytic)
CRYSTAL: Final = Drawing(_crystal_footprint, _crystal)
CONNECTOR: Final = Drawing(_connector_footprint, _connector)
SWITCH: Final = Drawing(_switch_footprint, _switch)
RELAY: Final = Drawing(_relay_footprint, _relay)
TRANSFORMER: Final = Drawing(_transformer_footprint, _transformer)
