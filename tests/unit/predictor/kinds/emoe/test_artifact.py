"""What is written is read again; what is damaged is found out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_by_safetensors

from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.predictor.kinds.emoe.artifact import codec_of, dump_learned, load_learned, width_for
from tests.unit.predictor.kinds.emoe.untrained import EXPERTS, LAYERS, SLOTS, untrained

DATA = dump_learned(dataclasses.replace(untrained("emoe-a"), report={"overlap": 0.5}))


def test_it_comes_back_as_it_was() -> None:
    found = load_learned(DATA)
    expected = untrained("emoe-a")
    assert found.architecture == expected.architecture
    assert (found.model, found.version, found.created_ms, found.sequences) == ("m", 1, 1000, 20)
    assert found.report == {"overlap": 0.5}
    assert found.priors.tasks == expected.priors.tasks
    np.testing.assert_array_equal(found.priors.by_slot, expected.priors.by_slot)
    assert set(found.weights) == set(expected.weights)
    for name, array in expected.weights.items():
        np.testing.assert_array_equal(found.weights[name], array)
    assert dump_learned(found) == DATA
    info = codec_of("emoe-a").info(found.as_version(7, 5), 9)
    assert (info.kind, info.version, info.created_ms, info.sequences, info.bytes) == ("emoe-a", 7, 5, 20, 9)


def test_a_file_of_another_kind_is_damaged() -> None:
    assert codec_of("emoe-a").load(DATA).model == "m"
    with pytest.raises(Damaged, match="of the kind emoe-a, not emoe-l"):
        codec_of("emoe-l").load(DATA)


def test_others_can_read_it() -> None:
    arrays = load_by_safetensors(DATA)
    assert arrays["priors"].shape == (3, LAYERS, SLOTS, EXPERTS)


@given(st.data())
def test_whatever_is_cut_or_overwritten_is_an_artifact_or_damaged(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, min(3000, len(DATA) - 1)))
    changed = bytearray(DATA)
    changed[place] = data.draw(st.integers(0, 255))
    for attempt in (bytes(changed), DATA[:place]):
        try:
            load_learned(attempt)
        except Damaged:
            continue
        assert attempt != DATA[:place]


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "greenroom-predictor"},
        {"format_version": "2"},
        {"kind": "emoe-l"},
        {"kind": "statistics"},
        {"architecture": "{}"},
        {"tasks": '["", "a"]'},
        {"tasks": '["a", "", "b"]'},
        {"tasks": '["", 1, 2]'},
        {"version": "one"},
        {"report": "["},
    ],
)
def test_what_contradicts_itself_is_damaged(changed: dict[str, str]) -> None:
    arrays, metadata = load_tensors(DATA)
    with pytest.raises(Damaged):
        load_learned(dump_tensors(arrays, {**metadata, **changed}))


@pytest.mark.parametrize("name", ["priors", "slots"])
def test_arrays_that_are_no_shares_are_damaged(name: str) -> None:
    arrays, metadata = load_tensors(DATA)
    for bad in (arrays[name] * np.float32(np.nan), -arrays[name], arrays[name][..., :1]):
        with pytest.raises(Damaged):
            load_learned(dump_tensors({**arrays, name: bad}, metadata))
    del arrays[name]
    with pytest.raises(Damaged):
        load_learned(dump_tensors(arrays, metadata))


def test_the_width_suits_the_model() -> None:
    assert [width_for(experts) for experts in (4, 16, 32, 64, 128, 256)] == [32, 32, 32, 64, 128, 128]
