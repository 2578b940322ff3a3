"""The layout of codes in records for the compiled products (``native/grouped_products.inc``).

A matrix ``[outputs, inputs]`` lies in *panels* of 32 outputs. A panel has two *halves* of 16. In a first projection
that joins gates and ups they are 16 gates and the ups of the same neurons, else 32 neighbours. A panel is a run of
*units* of some inputs, and has the scales of a *group* of inputs after those of the group before. Outputs and inputs
that are missing in the last panel and unit are zeros.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from greenroom.moe.formats.byte_moves import transposed
from greenroom.moe.native.rows import native_rows_or_none

HALF: Final = 16
PANEL: Final = 2 * HALF
UNIT: Final = 32
"""Inputs of a unit in ``byte_codes`` and ``bit_codes``."""


def panels_of(outputs: int, *, joined: bool) -> int:
    """``joined``: the matrix is gates, then as many ups."""
    return -(-outputs // 2 // HALF) if joined else -(-outputs // PANEL)


def units_of(inputs: int) -> int:
    return -(-inputs // UNIT)


def halves_of(rows: torch.Tensor, *, joined: bool) -> torch.Tensor:
    """``rows[outputs, n]``, of whatever the outputs have, as ``[panels, 2, 16, n]``."""
    outputs, width = rows.shape
    panels = panels_of(outputs, joined=joined)
    if joined:
        gates_and_ups = _padded(rows.view(2, outputs // 2, width), panels * HALF)
        return gates_and_ups.view(2, panels, HALF, width).transpose(0, 1)
    return _padded(rows[None], panels * PANEL).view(panels, 2, HALF, width)


def rows_of(halves: torch.Tensor, outputs: int, *, joined: bool) -> torch.Tensor:
    """What ``halves_of`` was given."""
    panels, _, _, width = halves.shape
    if not joined:
        return halves.reshape(panels * PANEL, width)[:outputs]
    both = halves.transpose(0, 1).reshape(2, panels * HALF, width)
    return both[:, : outputs // 2].reshape(outputs, width)


def lane_values(values: torch.Tensor, *, joined: bool) -> torch.Tensor:
    """Scales or minimums ``[outputs, groups]`` as ``[panels, groups, 32]``."""
    halves = halves_of(values, joined=joined)
    return halves.permute(0, 3, 1, 2).reshape(halves.shape[0], values.shape[1], PANEL)


def halves_of_lanes(lanes: torch.Tensor) -> torch.Tensor:
    """What ``lane_values`` has laid out: ``[panels, 2, 16, groups]``."""
    panels, groups, _ = lanes.shape
    return lanes.view(panels, groups, 2, HALF).permute(0, 2, 3, 1)


def byte_codes(codes: torch.Tensor, *, joined: bool) -> torch.Tensor:
    """Bytes ``[outputs, inputs]`` as ``[panels, units, 1024]``: for an input 16 of the left half, then of the right."""
    halves, units = halves_of(_whole_units(codes), joined=joined), units_of(codes.shape[1])
    return transposed(halves.reshape(-1, PANEL, units * UNIT)).view(-1, units, UNIT * PANEL)


def halves_of_bytes(codes: torch.Tensor) -> torch.Tensor:
    """The codes that ``byte_codes`` has laid out: ``[panels, 2, 16, units * 32]``."""
    panels, units, _ = codes.shape
    halves = codes.view(panels, units, UNIT, 2, HALF).permute(0, 3, 4, 1, 2)
    return halves.reshape(panels, 2, HALF, units * UNIT)


def bit_codes(codes: torch.Tensor, bits: int, *, joined: bool) -> torch.Tensor:
    """Codes of 1, 2 or 4 ``bits`` in ``uint8[outputs, inputs]`` as ``[panels, units, 128 * bits]``.

    A row of a unit is 16 lanes of 32 bits, little-endian, a lane for one output of each half. From the lowest bits on
    it has an input of the left half, the same one of the right half, the next input of both, and so on.
    """
    units = units_of(codes.shape[1])
    native = native_rows_or_none()
    if native is not None:
        panels = panels_of(len(codes), joined=joined)
        into = torch.empty(panels, units, 4 * bits * PANEL, dtype=torch.uint8)
        native.bit_panels(codes.contiguous(), bits, into, joined=joined)
        return into
    # Eight inputs at a time, the first one lowest; both halves of an input are neighbours in its byte.
    eights = halves_of(_whole_units(codes), joined=joined).view(torch.int64)
    both = eights[:, 0] | eights[:, 1] << bits
    width = 2 * bits
    for apart in (8, 16, 32):  # from there on the next ones follow, and are moved beside the ones before
        if width < apart:
            both |= both >> apart - width
            both &= sum(((1 << 2 * width) - 1) << place for place in range(0, 63, 2 * apart))
        width *= 2
    own = both.view(torch.uint8).view(-1, HALF, units, UNIT // 8, 8)[..., : 2 * bits]
    lanes = own.reshape(-1, HALF, units, 8 * bits).view(torch.int32)
    return lanes.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(-1, units, 4 * bits * PANEL)


def halves_of_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes that ``bit_codes`` has packed: ``[panels, 2, 16, units * 32]``."""
    panels, units, _ = packed.shape
    together = 16 // bits
    several = torch.stack([packed >> bits * place & (1 << bits) - 1 for place in range(8 // bits)], dim=-1)
    lanes = several.view(panels, units, UNIT // together, HALF, together, 2).permute(0, 5, 3, 1, 2, 4)
    return lanes.reshape(panels, 2, HALF, units * UNIT)


def _whole_units(codes: torch.Tensor) -> torch.Tensor:
    missing = -codes.shape[1] % UNIT
    return functional.pad(codes, (0, missing)) if missing else codes


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``rows[n, outputs, width]`` with so many outputs."""
    missing = count - rows.shape[1]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
