"""Keys are dense and layer by layer; nonsense is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.expert_keys import Catalogue


def test_keys_run_through_layers_of_different_widths() -> None:
    catalogue = Catalogue("pool", experts_per_layer=[2, 4, 3], top_k=[1, 2, 3], expert_bytes=[10, 20, 20])

    assert catalogue.size == 9
    assert catalogue.layers == 3
    assert [catalogue.key(1, 0), catalogue.key(1, 3), catalogue.key(2, 0)] == [2, 5, 6]
    assert catalogue.layer_of.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert catalogue.index_of.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert catalogue.bytes_of.tolist() == [10, 10, 20, 20, 20, 20, 20, 20, 20]
    assert catalogue.span(1) == slice(2, 6)
    assert catalogue.record_bytes is None


def test_alike_layers_share_one_record_size() -> None:
    catalogue = Catalogue.uniform("pool", layers=3, experts=8, top_k=2, expert_bytes=4096)

    assert catalogue.record_bytes == 4096
    assert catalogue.top_k.tolist() == [2, 2, 2]
    assert catalogue.size == 24


def test_whole_models_are_experts_of_one_layer_with_their_own_sizes() -> None:
    catalogue = Catalogue.of_models("graph", [100, 50, 75])

    assert (catalogue.layers, catalogue.size) == (1, 3)
    assert catalogue.bytes_of.tolist() == [100, 50, 75]
    assert catalogue.top_k.tolist() == [0]


@pytest.mark.parametrize(("layer", "index"), [(0, 8), (0, -1), (2, 0), (-1, 0)])
def test_a_key_that_does_not_exist_is_an_index_error(layer: int, index: int) -> None:
    with pytest.raises(IndexError, match="has no expert"):
        Catalogue.uniform("pool", layers=2, experts=8, top_k=2).key(layer, index)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("experts_per_layer", {"experts_per_layer": []}),
        ("experts_per_layer", {"experts_per_layer": [4, 0]}),
        ("top_k", {"top_k": [2]}),
        ("top_k", {"top_k": [2, 5]}),
        ("top_k", {"top_k": [-1, 2]}),
        ("expert_bytes", {"expert_bytes": [1, 2, 3]}),
        ("expert_bytes", {"expert_bytes": [1, 0]}),
        ("decoder_start", {"decoder_start": 2}),
        ("decoder_start", {"decoder_start": -1}),
    ],
)
def test_nonsense_is_refused_by_field(field: str, change: dict[str, Any]) -> None:
    sound: dict[str, Any] = {"experts_per_layer": [4, 4], "top_k": [2, 2], "expert_bytes": [1, 1]}

    with pytest.raises(InvalidConfig) as caught:
        Catalogue("pool", **(sound | change))

    assert caught.value.field == field


def test_its_arrays_can_not_be_written() -> None:
    catalogue = Catalogue.uniform("pool", layers=2, experts=4, top_k=2)

    for array in (catalogue.first, catalogue.layer_of, catalogue.index_of, catalogue.bytes_of, catalogue.top_k):
        assert isinstance(array, np.ndarray)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
