"""The trace: which steps it gives, and its file."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.replay import RoutingTrace, TraceError
from greenroom.replay.traces.steps import groups
from tests.unit.replay.traces import odd_traces, trace_of


def test_a_sequence_that_ends_is_replaced_at_once() -> None:
    trace = trace_of(3, 1, 0, 2, 1)

    assert [step.sequences.tolist() for step in trace.steps(concurrent=2)] == [[0, 1], [0, 3], [0, 3], [4]]
    assert [step.sequences.tolist() for step in trace.steps()] == [[0], [0], [0], [1], [3], [3], [4]]


def test_a_step_has_each_sequences_own_next_row() -> None:
    trace = trace_of(2, 2, layers=3, k=2)

    first, second = trace.steps(concurrent=2)

    assert first.picks.tolist() == trace.experts[[0, 2]].tolist()
    assert second.picks.tolist() == trace.experts[[1, 3]].tolist()


@pytest.mark.parametrize(("tokens", "sizes"), [(0, []), (1, [1]), (4, [2, 2]), (5, [2, 2, 1]), (99, [2, 2, 2, 1])])
def test_it_stops_in_the_midst_when_the_tokens_are_used(tokens: int, sizes: list[int]) -> None:
    steps = list(trace_of(4, 3).steps(concurrent=2, tokens=tokens))

    assert [len(step.sequences) for step in steps] == sizes


def test_no_sequence_at_once_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="concurrent"):
        list(trace_of(2).steps(concurrent=0))


def test_a_trace_of_the_fewest_arrays_is_read(tmp_path: Path) -> None:
    trace = trace_of(3, 4, layers=2, k=2)
    path = tmp_path / "trace.npz"
    np.savez(path, experts=trace.experts, seq_starts=trace.seq_starts, num_experts=np.int64(4), layer_ids=np.arange(2))

    read = RoutingTrace.load(path)

    assert read.experts.tolist() == trace.experts.tolist()
    assert read.seq_starts.tolist() == [0, 3, 7]
    assert read.num_experts == 4


PICKS = np.tile(np.array([0, 1], dtype=np.uint8), (7, 2, 1))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"experts": np.zeros((7, 2), np.uint8)}, "must be"),
        ({"experts": PICKS + np.uint8(3)}, "layer 0 must lie from 0 to 3"),
        ({"experts": PICKS, "num_experts": np.array([4, 1])}, "layer 1 must lie from 0 to 0"),
        ({"experts": np.zeros((7, 2, 2), np.uint8)}, "row 0 picks an expert of layer 0 twice"),
        ({"experts": PICKS.astype(np.int8) - np.int8(1)}, "negative"),
        ({"experts": np.zeros((7, 2, 2), np.float32)}, "integers"),
        ({"seq_starts": np.array([0, 5])}, "seq_starts"),
        ({"seq_starts": np.array([0, 5, 3, 7])}, "seq_starts"),
        ({"seq_starts": np.array([], np.int64)}, "seq_starts"),
        ({"seq_starts": np.array([0.0, 7.0])}, "seq_starts must be integers"),
        ({"num_experts": np.array([4, 4, 4])}, "num_experts"),
        ({"num_experts": np.int64(0)}, "num_experts"),
        ({"experts": None}, "has no array 'experts'"),
        ({"experts": np.array([None] * 4)}, "no routing trace"),
        ({"layer_ids": np.arange(3)}, "layer_ids"),
        ({"top_k": np.array([2, 3])}, "top_k"),
        ({"top_k": np.array([2, 1])}, "layer 1: a row has more picks than its top_k"),
        ({"phase": np.full(7, 3)}, "phase"),
        ({"phase": np.zeros(6, np.uint8)}, "phase"),
        ({"step": np.array([0, 1, 2, 0, 1, 3, 2])}, "step must not fall"),
        ({"step": np.array([0, 1, 1, 0, 1, 2, 3])}, "step: a decoded row"),
        ({"task": np.array(["a"])}, "task"),
        ({"task": np.array([["a", "b"]])}, "task"),
        ({"request": np.arange(2)}, "request must be text"),
        ({"arrival": np.array([0.0, np.inf])}, "arrival"),
        ({"expert_bytes": np.int64(0)}, "expert_bytes"),
        ({"decoder_start": np.int64(2)}, "decoder_start must be one of the 2 layers"),
        ({"decoder_start": np.array([1])}, "decoder_start must be one number"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    sound: dict[str, object] = {"experts": PICKS, "seq_starts": np.array([0, 3, 7]), "num_experts": np.int64(4)}
    arrays = {name: value for name, value in (sound | change).items() if value is not None}
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]

    with pytest.raises(TraceError, match=complaint):
        RoutingTrace.load(path)


def test_a_file_that_is_not_there_or_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no routing trace"):
        RoutingTrace.load(tmp_path / "absent.npz")
    for number, content in enumerate((b"", b"PK\x03\x04 cut short", b"\x93NUMPY no archive")):
        broken = tmp_path / f"{number}.npz"
        broken.write_bytes(content)
        with pytest.raises(TraceError, match="no routing trace"):
            RoutingTrace.load(broken)


def recorded_trace() -> RoutingTrace:
    """Two sequences whose prompts ran in chunks, beside each other; layers of 3 and 5 experts, top-1 and top-2."""
    none = 255
    rows = [
        # layer 0, layer 1
        [[0, none], [0, 1]],
        [[1, none], [2, 3]],
        [[2, none], [4, 0]],
        [[0, none], [1, 2]],
        [[1, none], [3, 4]],
        [[2, none], [0, none]],
    ]
    return RoutingTrace(
        np.array(rows, dtype=np.uint8),
        np.array([0, 4, 6]),
        np.array([3, 5]),
        layer_ids=np.array([1, 3]),
        top_k=np.array([1, 2]),
        phase=np.array([0, 0, 0, 1, 0, 1], dtype=np.uint8),
        step=np.array([0, 0, 1, 2, 1, 2]),
        task=("compare", "question"),
        request=("a", "b"),
        arrival=np.array([0.0, 0.25]),
        expert_bytes=np.array([4096, 8192]),
        model="small",
        decoder_start=1,
    )


def test_everything_survives_the_file(tmp_path: Path) -> None:
    trace, path = recorded_trace(), tmp_path / "trace.npz"

    trace.save(path)
    read = RoutingTrace.load(path)

    for field in fields(RoutingTrace):
        kept, expected = getattr(read, field.name), getattr(trace, field.name)
        assert np.array_equal(kept, expected), field.name
        assert np.asarray(kept).dtype == np.asarray(expected).dtype, field.name
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.npz"]


def test_nothing_in_the_file_is_pickled(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    recorded_trace().save(path)

    with np.load(path, allow_pickle=False) as arrays:
        assert {name: arrays[name].dtype.kind for name in arrays.files}["task"] == "U"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.npz"
    trace_of(3).save(path)
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraceError, match="No space left"):
        recorded_trace().save(path)

    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.npz"]


def test_the_catalogue_has_each_layers_own_shape() -> None:
    catalogue = recorded_trace().catalogue()

    assert catalogue.experts_per_layer.tolist() == [3, 5]
    assert catalogue.top_k.tolist() == [1, 2]
    assert catalogue.decoder_start == 1
    assert recorded_trace().catalogue(expert_bytes=None).bytes_of.tolist() == [4096] * 3 + [8192] * 5
    with pytest.raises(TraceError, match="how large"):
        trace_of(3).catalogue(expert_bytes=None)


def test_where_every_value_is_an_expert_none_means_no_pick() -> None:
    full = RoutingTrace(np.array([[[255, 3]]], dtype=np.uint8), np.array([0, 1]), 256)

    assert full.no_pick is None
    assert recorded_trace().no_pick == 255


def as_lists(steps: Any) -> list[tuple[list[int], list[int], list[int], tuple[int, ...], tuple[int, ...]]]:
    return [
        (step.sequences.tolist(), step.picks[:, 0, 0].tolist(), step.phases.tolist(), step.started, step.ended)
        for step in steps
    ]


def test_recorded_steps_are_those_that_ran() -> None:
    prefill, decode = int(Phase.PREFILL), int(Phase.DECODE)

    assert as_lists(recorded_trace().recorded_steps()) == [
        ([0, 0], [0, 1], [prefill, prefill], (0,), ()),
        ([0, 1], [2, 1], [prefill, prefill], (1,), ()),
        ([0, 1], [0, 2], [decode, decode], (), (0, 1)),
    ]
    assert [len(step.picks) for step in recorded_trace().recorded_steps(tokens=3)] == [2, 1]
    with pytest.raises(TraceError, match="ran together"):
        trace_of(3).recorded_steps()


def test_prompts_run_in_the_chunks_that_were_recorded() -> None:
    steps = recorded_trace().steps()

    assert [(step.sequences.tolist(), step.started, step.ended) for step in steps] == [
        ([0, 0], (0,), ()),
        ([0], (), ()),
        ([0], (), (0,)),
        ([1], (1,), ()),
        ([1], (), (1,)),
    ]


def test_prompts_run_in_chunks_of_a_given_size_where_none_were_recorded() -> None:
    trace = replace(recorded_trace(), step=None)

    assert [step.sequences.tolist() for step in trace.steps(prefill_chunk=2)] == [[0, 0], [0], [0], [1], [1]]
    assert [step.sequences.tolist() for step in trace.steps(concurrent=2)] == [[0, 0, 0, 1], [0, 1]]
    cut = list(trace.steps(concurrent=2, tokens=5))
    assert [(len(step.picks), step.ended) for step in cut] == [(4, ()), (1, (0,))], "1 has a row to go"
    with pytest.raises(InvalidConfig, match="prefill_chunk"):
        list(trace.steps(prefill_chunk=0))


@pytest.mark.parametrize("concurrent", [1, 2, 3, 7])
def test_every_row_of_every_sequence_runs_once_and_in_order(concurrent: int) -> None:
    trace = trace_of(3, 0, 5, 2, 4, layers=2, k=2, experts=9)

    for candidate in (trace, replace(trace, phase=np.resize(np.array([0, 0, 1], dtype=np.uint8), trace.tokens))):
        seen: dict[int, list[Any]] = {}
        started: list[int] = []
        ended: list[int] = []
        for step in candidate.steps(concurrent=concurrent, prefill_chunk=2):
            started += step.started
            assert set(step.sequences.tolist()) <= set(started) - set(ended)
            for sequence, picks in zip(step.sequences.tolist(), step.picks.tolist(), strict=True):
                seen.setdefault(sequence, []).append(picks)
            ended += step.ended
        assert started == sorted(seen) == sorted(ended) == [0, 2, 3, 4]
        for sequence, rows in seen.items():
            begin, end = trace.seq_starts[sequence : sequence + 2]
            assert rows == trace.experts[begin:end].tolist()


@given(trace=odd_traces(), concurrent=st.integers(1, 4))
def test_groups_are_the_distinct_picks_of_a_layer(trace: RoutingTrace, concurrent: int) -> None:
    catalogue = trace.catalogue()
    expected = []
    for step in trace.steps(concurrent=concurrent):
        for layer in range(trace.layers):
            own = [int(pick) for pick in step.picks[:, layer].ravel() if pick < catalogue.experts_per_layer[layer]]
            keys = [catalogue.key(layer, pick) for pick in (own if len(step.picks) == 1 else sorted(set(own)))]
            expected.append(keys)

    assert list(groups(catalogue, trace.steps(concurrent=concurrent))) == expected
