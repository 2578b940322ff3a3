"""The start weights copy: what was said before becomes likelier the second time, before any training."""

from __future__ import annotations

import torch

from greenroom.demo.train.batches import Settings
from greenroom.demo.train.copying_start import start_copying
from greenroom.demo.train.trainer import build_model


@torch.no_grad()
def test_a_repetition_is_likelier_than_what_it_repeats() -> None:
    model = build_model(Settings())
    said = torch.randint(6, 2048, (24, 15), generator=torch.Generator().manual_seed(2))
    twice = torch.cat((said, said), dim=1)

    def second_minus_first() -> float:
        losses = torch.nn.functional.cross_entropy(
            model(twice).logits[:, :-1].transpose(1, 2), twice[:, 1:], reduction="none"
        )
        return float(losses[:, 15:].mean() - losses[:, :14].mean())

    assert abs(second_minus_first()) < 0.05
    start_copying(model, seed=0)
    assert second_minus_first() < -0.3
