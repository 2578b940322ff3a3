"""Packages of semiconductors with leads in rows: SOT-23, SOIC-8, QFP, QFN."""

from __future__ import annotations

from typing import Final

from greenroom.demo.board.canvas import Canvas, Field, without
from greenroom.demo.board.lettering import bitmap, random_text
from greenroom.demo.board.parts.base import BLACK, PRINT, SILVER, Drawing, solder_ball
from greenroom.demo.board.surroundings import Rng, Style, jittered, pads, print_name, print_outline, shadow

_SOIC_PITCH: Final = 0.42
_SOIC_LEADS: Final = 4
_QFP_PITCH: Final = 0.20
_QFP_LEADS: Final = 7
_QFN_PITCH: Final = 0.27
_QFN_PADS: Final = 5


def _two_rows(canvas: Canvas, reach: float, half: tuple[float, float], pitch: float, count: int) -> Field:
    """Boxes along the left and right edge; ``half``: half their length and width, ``reach``: of their middle."""
    sideways = canvas.on(canvas.frame.turned(90))
    return _least(*(sideways.comb(0, side * reach, half[1], half[0], pitch, count) for side in (-1, 1)))


def _four_rows(canvas: Canvas, reach: float, half: tuple[float, float], pitch: float, count: int) -> Field:
    rows = _two_rows(canvas, reach, half, pitch, count)
    return _least(rows, *(canvas.comb(0, side * reach, half[1], half[0], pitch, count) for side in (-1, 1)))


def _least(first: Field, *others: Field) -> Field:
    for other in others:
        first = first.clip(max=other)
    return first


def _body(canvas: Canvas, rng: Rng, shape: Field) -> None:
    grey = jittered(rng, BLACK, 0.035)
    canvas.lighten(shape - 0.02, -0.4)
    canvas.paint(shape, canvas.shade(grey, 0, 0, 1.2, 0.05))
    canvas.lighten(without(shape, shape + 0.05), 0.08)


def _dot(canvas: Canvas, rng: Rng, x: float, y: float, radius: float) -> None:
    """Marks the first lead: printed, or a dimple."""
    printed = rng.random() < 0.6
    canvas.paint(canvas.disc(x, y, radius), (0.78, 0.78, 0.76) if printed else (0.34, 0.34, 0.35))
    if not printed:
        canvas.paint(canvas.disc(x + radius * 0.2, y + radius * 0.2, radius * 0.7), (0.20, 0.20, 0.21))


def _lines(canvas: Canvas, rng: Rng, patterns: tuple[str, ...], cell: float) -> None:
    colour = jittered(rng, (0.62, 0.62, 0.61), 0.10)
    for place, pattern in enumerate(patterns):
        height = (place - (len(patterns) - 1) / 2) * cell * 7
        canvas.stamp(bitmap(random_text(rng, pattern)), 0, height, cell, colour, 0.75)


# --- SOT-23: one lead above, two below


def _sot23_shape(canvas: Canvas, half_width: float, half_height: float) -> Field:
    lower = canvas.comb(0, 0.66, half_width, half_height, 0.86, 2)
    return _least(canvas.box(0, -0.66, half_width, half_height), lower)


def _sot23_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    pads(canvas, style, _sot23_shape(canvas, 0.19, 0.26))
    for side in (-1, 1):
        canvas.paint(canvas.line((side * 0.80, -0.34), (side * 0.80, 0.25), 0.035), style.silk, 0.85)
    print_name(canvas, style, rng, "Q", -1.08)


def _sot23(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """Its defect: solder bridges the two leads below."""
    leads, body = _sot23_shape(canvas, 0.13, 0.24), canvas.box(0, 0, 0.68, 0.42, 0.04)
    shadow(canvas, style, _least(leads, body))
    canvas.paint(leads, canvas.shade(jittered(rng, SILVER, 0.04), 0, 0, 0.8, 0.12))
    _body(canvas, rng, body)
    canvas.stamp(bitmap(random_text(rng, "A9A")), 0, 0, 0.075, jittered(rng, PRINT, 0.08), 0.8)
    if defect:
        solder_ball(canvas, 0, rng.uniform(0.58, 0.72), 0.36, rng.uniform(0.09, 0.14))


# --- SOIC-8: four leads left and right


def _soic_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    pads(canvas, style, _two_rows(canvas, 0.90, (0.22, 0.13), _SOIC_PITCH, _SOIC_LEADS))
    for side in (-1, 1):
        canvas.paint(canvas.line((-0.5, side * 0.98), (0.5, side * 0.98), 0.035), style.silk, 0.85)
    canvas.paint(canvas.disc(-0.90, -0.94, 0.06), style.silk)
    print_name(canvas, style, rng, "U", rng.choice([-1, 1]) * 1.12)


def _soic8(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    leads = _two_rows(canvas, 0.80, (0.24, 0.085), _SOIC_PITCH, _SOIC_LEADS)
    body = canvas.box(0, 0, 0.60, 0.84, 0.03)
    side, place = float(rng.choice([-1, 1])), int(rng.integers(_SOIC_LEADS))
    height = (place - (_SOIC_LEADS - 1) / 2) * _SOIC_PITCH
    if defect == "lifted":
        leads = without(leads, canvas.box(side * 0.9, height, 0.32, _SOIC_PITCH / 2))
    shadow(canvas, style, _least(leads, body))
    canvas.paint(leads, canvas.shade(jittered(rng, SILVER, 0.04), 0, 0, 1.2, 0.10))
    if defect == "lifted":
        _lifted(canvas, rng, side, height, 0.60, 0.36)
    _body(canvas, rng, body)
    canvas.lighten(canvas.box(-0.5, 0, 0.07, 0.82), 0.10, blur=0.03)  # the slanted edge along the first leads
    _dot(canvas, rng, -0.32, -0.62, 0.10)
    _lines(canvas, rng, ("A99", "999"), 0.062)
    if defect == "bridged":
        low = height if place < _SOIC_LEADS - 1 else height - _SOIC_PITCH
        length = _SOIC_PITCH * rng.uniform(0.62, 0.80)
        solder_ball(canvas, side * rng.uniform(0.84, 0.96), low + _SOIC_PITCH / 2, rng.uniform(0.14, 0.18), length)


def _lifted(canvas: Canvas, rng: Rng, side: float, height: float, edge: float, length: float) -> None:
    """A lead that is bent sideways and upwards. Its pad stays dull, without solder."""
    canvas.lighten(canvas.box(side * (edge + length * 0.75), height, length * 0.6, 0.11, 0.03), -0.55, blur=0.04)
    bend = float(rng.choice([-1, 1])) * rng.uniform(0.15, 0.20)
    line = canvas.line((side * edge, height), (side * (edge + length * 0.8), height + bend), 0.12)
    canvas.lighten(line - 0.05, -0.5, blur=0.04)
    canvas.paint(line, (0.93, 0.93, 0.94))


# --- QFP: leads on all four sides


def _qfp_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    pads(canvas, style, _four_rows(canvas, 0.95, (0.17, 0.065), _QFP_PITCH, _QFP_LEADS))
    canvas.paint(canvas.disc(-0.98, -0.98, 0.06), style.silk)
    outline = canvas.box(0, 0, 0.94, 0.94)
    corners = without(outline, canvas.box(0, 0, 1.3, 0.80), canvas.box(0, 0, 0.80, 1.3))
    print_outline(canvas, style, corners)


def _qfp(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    leads = _four_rows(canvas, 0.86, (0.20, 0.05), _QFP_PITCH, _QFP_LEADS)
    body = canvas.box(0, 0, 0.72, 0.72, 0.04)
    edge = canvas.on(canvas.frame.turned(90.0 * int(rng.integers(4))))
    place = int(rng.integers(_QFP_LEADS))
    height = (place - (_QFP_LEADS - 1) / 2) * _QFP_PITCH
    if defect == "lifted":
        leads = without(leads, edge.box(0.95, height, 0.30, _QFP_PITCH / 2))
    shadow(canvas, style, _least(leads, body))
    canvas.paint(leads, canvas.shade(jittered(rng, SILVER, 0.04), 0, 0, 1.2, 0.10))
    if defect == "lifted":
        _lifted(edge, rng, 1.0, height, 0.70, 0.34)
    _body(canvas, rng, body)
    _dot(canvas, rng, -0.50, -0.50, 0.09)
    _lines(canvas, rng, ("AA99", "9999", "99A"), 0.055)
    if defect == "bridged":
        low = height if place < _QFP_LEADS - 1 else height - _QFP_PITCH
        length = _QFP_PITCH * rng.uniform(0.9, 1.4)
        solder_ball(edge, rng.uniform(0.88, 0.98), low + _QFP_PITCH / 2, rng.uniform(0.12, 0.15), length)


# --- QFN: pads at the edges, no leads


def _qfn_footprint(canvas: Canvas, style: Style, rng: Rng) -> None:
    pads(canvas, style, _four_rows(canvas, 0.82, (0.17, 0.08), _QFN_PITCH, _QFN_PADS))
    pads(canvas, style, canvas.box(0, 0, 0.42, 0.42, 0.03))
    outline = canvas.box(0, 0, 1.04, 1.04)
    print_outline(canvas, style, without(outline, canvas.box(0, 0, 1.3, 0.82), canvas.box(0, 0, 0.82, 1.3)))
    canvas.paint(canvas.disc(-1.08, -0.90, 0.055), style.silk)


def _qfn(canvas: Canvas, style: Style, rng: Rng, defect: str | None) -> None:
    """Its defect: solder bridges pads along an edge."""
    body = canvas.box(0, 0, 0.80, 0.80, 0.02)
    shadow(canvas, style, body)
    _body(canvas, rng, body)
    ends = _four_rows(canvas, 0.78, (0.05, 0.06), _QFN_PITCH, _QFN_PADS)
    canvas.paint(ends, jittered(rng, SILVER, 0.05), 0.9)
    _dot(canvas, rng, -0.54, -0.54, 0.10)
    _lines(canvas, rng, ("A99", "999", "99"), 0.060)
    if defect:
        edge = canvas.on(canvas.frame.turned(90.0 * int(rng.integers(4))))
        along = (float(rng.integers(_QFN_PADS - 1)) - (_QFN_PADS - 2) / 2) * _QFN_PITCH
        solder_ball(edge, rng.uniform(0.84, 0.94), along, 0.11, _QFN_PITCH * rng.uniform(0.65, 1.0))


SOT23: Final = Drawing(_sot23_footprint, _sot23)
QFN: Final = Drawing(_qfn_footprint, _qfn)
SOIC8: Final = Drawing(_soic_footprint, _soic8)
QFP: Final = Drawing(_qfp_footprint, _qfp)
