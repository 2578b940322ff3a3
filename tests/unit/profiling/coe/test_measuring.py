"""Times and bytes of real batches: that they are measured as they say."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from greenroom.coe.computing.all_resident import resident_weights
from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Input, Preparations
from greenroom.coe.computing.intermediates import intermediate_bytes
from greenroom.coe.loading.architecture import build_architectures
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.coe.loading.packing import ensure_pack
from greenroom.core.errors import InvalidRequest
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.pack.pack_file import PackFile
from greenroom.profiling.coe.batch_memory import measure_bytes, never_shrinking, peak_growth
from greenroom.profiling.coe.batch_timing import SideBySide, Subject, TimingPlan, measure_times, threads_of, warm_up
from greenroom.profiling.coe.config import CoeProfileConfig
from greenroom.profiling.coe.profiler import Here, measure_costs
from greenroom.profiling.coe.sample_inputs import Samples, inputs_of
from tests.contract.coe.single_expert import collaborate, record_of
from tests.quiet_transformers import no_progress_bars as no_progress_bars
from tests.random_experts import DETECTORS, encoded, random_image, save_board, save_expert

Measured = tuple[list[ExpertComputer], Subject]


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    collaboration = read_collaboration(save_board(tmp_path / "board"))
    architectures = build_architectures(collaboration)
    with closing(PackFile.open(ensure_pack(collaboration, architectures, tmp_path / "cache"))) as pack:
        weights = resident_weights(pack)
    computers = [ExpertComputer(collaboration, architectures, Preparations()) for _ in range(2)]
    checkpoint = collaboration.experts[0]
    key, experts = next(iter(collaboration.of_architecture().items()))
    inputs = inputs_of(checkpoint, None, None, 0)
    return computers, Subject(key, tuple(experts), tuple(weights[expert] for expert in experts), inputs)


def test_every_size_has_a_time_with_every_number_of_executors(measured: Measured) -> None:
    computers, subject = measured
    plan = TimingPlan(largest=4, rounds=2, repeats=1)
    sizes = warm_up(computers[0], subject, plan)
    assert sizes == [1, 2, 4]
    turns: list[None] = []
    found = measure_times(
        computers, [subject], lambda _: sizes, [1, 2], lambda n: threads_of(2, n), plan, lambda: turns.append(None)
    )
    assert len(turns) == 2 * 2 * 3
    assert {count: list(times) for count, times in found[subject.key].items()} == {1: sizes, 2: sizes}
    assert all(ms > 0 for times in found[subject.key].values() for ms in times.values())


def test_sizes_end_where_a_batch_takes_too_long(measured: Measured) -> None:
    computers, subject = measured
    assert warm_up(computers[0], subject, TimingPlan(largest=64, most_ms=0.0)) == [1]


def test_executors_compute_at_the_same_time_with_their_share_of_threads(measured: Measured) -> None:
    computers, subject = measured
    both, threads = threading.Barrier(2), set[int]()

    def computed(expert: int, inputs: Sequence[Input], weights: ExpertWeights) -> list[None]:
        both.wait(10)  # would break were one computed after the other
        threads.add(torch.get_num_threads())
        return [None] * len(inputs)

    for computer in computers:
        computer.compute = computed  # type: ignore[method-assign, assignment]
    before = torch.get_num_threads()
    with SideBySide(computers, 1) as executors:
        assert executors.batch_ms(subject, 2, repeats=3) > 0
    assert threads == {1}
    assert torch.get_num_threads() == before


def test_an_input_that_can_not_be_read_ends_the_measurement(measured: Measured) -> None:
    computers, subject = measured
    broken = Subject(subject.key, subject.experts, subject.weights, [b"no image"])
    with pytest.raises(InvalidRequest):
        warm_up(computers[0], broken, TimingPlan())


def test_bytes_are_no_fewer_than_what_the_process_has_grown_by(measured: Measured) -> None:
    computers, subject = measured
    found, peaks = measure_bytes(computers[0], subject, [1, 2, 8])
    assert list(found) == [1, 2, 8]
    assert found[1] <= found[2] <= found[8]
    assert all(found[size] >= peak for size, peak in peaks.items())


@pytest.mark.parametrize("family", DETECTORS)
def test_bytes_are_those_of_the_largest_images(tmp_path: Path, family: str) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert(family, tmp_path / "one")])
    record = record_of(experts, 0)
    inputs = inputs_of(experts.collaboration.experts[0], None, None, 0)
    found, _ = measure_bytes(experts.computer, Subject("one", (0,), (record,), inputs), [1, 4])
    wide, high = random_image(0, 144, 96), random_image(0, 96, 144)
    for batch in ([wide], [high], [wide] * 4, [wide, high] * 2):
        assert intermediate_bytes(experts.computer, 0, list(batch), record) <= found[len(batch)]


def test_memory_is_that_of_the_largest_images_whatever_the_samples(tmp_path: Path) -> None:
    """Of two experts of one architecture, of which the second one's processor makes larger images."""
    folders = [save_expert("yolos", tmp_path / name, seed=seed) for seed, name in enumerate(("small", "large"))]
    settings = folders[1] / "preprocessor_config.json"
    larger = {"size": {"shortest_edge": 64, "longest_edge": 96}}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | larger))
    experts = collaborate(tmp_path / "two.toml", folders)
    assert len(experts.architectures) == 1
    config = CoeProfileConfig(1 << 30, 1, TimingPlan(largest=2, rounds=1, repeats=1))
    samples = Samples(images=(encoded(random_image(0, 40, 40)),))
    with closing(PackFile.open(ensure_pack(experts.collaboration, experts.architectures, tmp_path / "cache"))) as pack:
        costs = measure_costs(
            experts.collaboration, experts.architectures, pack, config, Here("here", 2), samples, lambda *_: None
        )
    (found,) = costs.values()
    for count, announced in found.bytes_by_batch.items():
        batch = [random_image(0, 144, 96)] * count
        assert intermediate_bytes(experts.computer, 1, list(batch), record_of(experts, 1)) <= announced


def test_a_peak_that_the_system_does_not_tell(measured: Measured, tmp_path: Path) -> None:
    computers, subject = measured
    assert peak_growth(computers[0], subject, 1, tmp_path / "nothing") is None
    (tmp_path / "status").write_text("VmRSS:\t  100 kB\nVmHWM:\t  160 kB\n")
    assert peak_growth(computers[0], subject, 1, tmp_path) == 60 * 1024


def test_a_larger_batch_never_takes_less() -> None:
    assert never_shrinking({4: 10, 1: 7, 2: 30}) == {1: 7, 2: 30, 4: 30}
