"""Building a model on the meta device: its shapes are all that counts."""

from __future__ import annotations

import torch

from greenroom.moe.architecture.moe_layers import Outlined


def test_frequencies_with_zeros_behind_them_are_an_outline_too() -> None:
    """As Gemma 4 makes them where it rotates only a part of a head."""
    with torch.device("meta"), Outlined():
        made = torch.cat((torch.arange(0, 6, 2).to(dtype=torch.float), torch.zeros(2)), dim=0)
    assert made.shape == (5,)
    assert made.device.type == "meta"


def test_what_lies_on_one_device_stays_there() -> None:
    with Outlined():
        for made in (
            torch.cat([torch.arange(3), torch.arange(2)]),
            torch.cat([torch.arange(3), torch.arange(2)], 0),
            torch.cat(tensors=[torch.arange(3), torch.arange(2)], dim=0),
        ):
            assert made.tolist() == [0, 1, 2, 0, 1]
