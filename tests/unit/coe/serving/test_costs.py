"""Costs by a quick measurement, and out of a profile."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replaced

from greenroom.coe.computing.batch_size import bytes_of_batch
from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.images import decoded_bytes
from greenroom.coe.computing.inputs import Preparations
from greenroom.coe.computing.intermediates import intermediate_bytes
from greenroom.coe.loading.architecture import build_architectures
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.coe.loading.packing import ensure_pack
from greenroom.coe.serving import unprofiled_memory
from greenroom.coe.serving.config import ServingConfig
from greenroom.coe.serving.costs import MOST_UNPROFILED, ExecutorCosts, measure_quickly
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.coe.serving.unprofiled_memory import KEPT, unprofiled_bytes
from greenroom.core.coe_profile import FORMAT, ArchitectureProfile, CoeProfile, ExecutorsProfile, dump_coe_profile
from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, PackDamaged
from greenroom.core.machine import machine_name
from greenroom.experts.pack.layout import PAGE_BYTES
from greenroom.experts.pack.pack_file import PackFile
from tests.coe_profiles import costs as profiled_costs
from tests.coe_profiles import trial
from tests.contract.coe.single_expert import Experts, collaborate, record_of
from tests.quiet_transformers import no_progress_bars as no_progress_bars
from tests.random_experts import DETECTORS, random_image, save_board, save_expert


def test_no_time_is_zero(tmp_path: Path) -> None:
    """Of experts that take images, a detector among them: all three have costs, those of one architecture the same."""
    collaboration = read_collaboration(save_board(tmp_path))
    architectures = build_architectures(collaboration)
    pack = PackFile.open(ensure_pack(collaboration, architectures, tmp_path / "cache"))
    told: list[int] = []
    costs = measure_quickly(
        collaboration,
        ExpertComputer(collaboration, architectures, Preparations()),
        pack,
        lambda: told.append(1),
    )
    pack.close()
    assert len(told) == len(architectures) == 2
    for expert in range(3):
        own = costs.costs
        assert min(own.request_ms(expert), own.batch_ms_of(expert), own.load_ms(expert)) > 0
        assert costs.bytes_by_batch[expert][8] > costs.bytes_by_batch[expert][1] > 0
    resistor, chip, _ = (costs.costs.request_ms(expert) for expert in range(3))
    assert resistor == chip
    assert list(costs.most) == [MOST_UNPROFILED] * 3


def test_memory_is_that_of_the_longest_texts(tmp_path: Path) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert("bert", tmp_path / "one")])
    pack = PackFile.open(ensure_pack(experts.collaboration, experts.architectures, tmp_path / "cache"))
    costs = measure_quickly(experts.collaboration, experts.computer, pack)
    pack.close()
    longest = ["good " * 600] * 8
    needed = intermediate_bytes(experts.computer, 0, list(longest), record_of(experts, 0))
    short = intermediate_bytes(experts.computer, 0, ["good"] * 8, record_of(experts, 0))
    assert costs.bytes_by_batch[0][8] >= needed > 2 * short


@pytest.mark.parametrize("family", DETECTORS)
def test_memory_is_that_of_the_largest_images(tmp_path: Path, family: str) -> None:
    """Alone, in a batch of one size, and in a mixed one."""
    experts = collaborate(tmp_path / "one.toml", [save_expert(family, tmp_path / "one")])
    with closing(PackFile.open(ensure_pack(experts.collaboration, experts.architectures, tmp_path / "cache"))) as pack:
        costs = measure_quickly(experts.collaboration, experts.computer, pack)
    record = record_of(experts, 0)
    square, wide, high = (random_image(0, *size) for size in ((90, 90), (144, 96), (96, 144)))
    for count in (1, 2, 8, 16):
        announced = bytes_of_batch(costs.bytes_by_batch[0], count)
        for kinds in ([wide], [high], [wide, high]):
            batch = list(itertools.islice(itertools.cycle(kinds), count))
            assert intermediate_bytes(experts.computer, 0, list(batch), record) <= announced
        assert announced > 1.2 * KEPT * intermediate_bytes(experts.computer, 0, [square] * count, record)


def test_memory_of_many_large_images_is_bounded_by_that_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert("yolos", tmp_path / "one")])
    record, sample = record_of(experts, 0), random_image(0, 96, 64)
    used = intermediate_bytes(experts.computer, 0, [sample], record)
    measured = unprofiled_bytes(experts.computer, 0, sample, record)
    ticks = itertools.count()
    slow = unprofiled_bytes(experts.computer, 0, sample, record, most_s=7.9, clock=lambda: float(next(ticks)))
    monkeypatch.setattr(unprofiled_memory, "_MOST_BYTES", 8 * used - 1)
    large = unprofiled_bytes(experts.computer, 0, sample, record)
    assert slow == large == {1: measured[1], 8: int(KEPT * 8 * used)}
    assert 8 * measured[1] >= measured[8]


def texts_costs(tmp_path: Path, **config: object) -> tuple[ExecutorCosts, Experts]:
    experts = collaborate(tmp_path / "one.toml", [save_expert("bert", tmp_path / "one", **config)])  # type: ignore[arg-type]
    with closing(PackFile.open(ensure_pack(experts.collaboration, experts.architectures, tmp_path / "cache"))) as pack:
        return measure_quickly(experts.collaboration, experts.computer, pack), experts


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_memory_of_a_model_with_more_positions_is_that_of_its_longest_texts(tmp_path: Path, attention: str) -> None:
    costs, experts = texts_costs(tmp_path, max_position_embeddings=1500, _attn_implementation=attention)
    assert experts.computer.longest(0) == 1500
    for count in (1, 3, 8, 16):
        needed = intermediate_bytes(experts.computer, 0, ["good " * 1600] * count, record_of(experts, 0))
        assert needed <= bytes_of_batch(costs.bytes_by_batch[0], count) < 2 * needed


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_memory_is_bounded_where_measuring_would_take_long(tmp_path: Path, attention: str) -> None:
    experts = collaborate(
        tmp_path / "one.toml",
        [save_expert("bert", tmp_path / "one", max_position_embeddings=1500, _attn_implementation=attention)],
    )
    tried: list[int] = []

    def clock() -> float:
        tried.append(1)
        return 1.0 * len(tried)

    found = unprofiled_bytes(experts.computer, 0, "good", record_of(experts, 0), most_s=3.0, clock=clock)
    assert len(tried) == 2, "one length alone"
    for count in (1, 8):
        assert found[count] >= intermediate_bytes(experts.computer, 0, ["good " * 1600] * count, record_of(experts, 0))


def test_experts_of_one_architecture_have_the_memory_of_their_own_texts(tmp_path: Path) -> None:
    """One takes longer texts, by its tokenizer's settings."""
    folders = [save_expert("bert", tmp_path / name, seed=at) for at, name in enumerate(("short", "long"))]
    (folders[0] / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    experts = collaborate(tmp_path / "board.toml", folders)
    assert len(experts.architectures) == 1
    with closing(PackFile.open(ensure_pack(experts.collaboration, experts.architectures, tmp_path / "cache"))) as pack:
        costs = measure_quickly(experts.collaboration, experts.computer, pack)
    for expert in range(2):
        needed = intermediate_bytes(experts.computer, expert, ["good " * 60] * 8, record_of(experts, expert))
        assert costs.bytes_by_batch[expert][8] >= needed


@pytest.mark.parametrize(
    ("name", "changed"),
    [("preprocessor_config.json", {"image_mean": [0.1, 0.2]}), ("config.json", {"return_dict": False})],
)
def test_an_expert_that_can_compute_nothing_is_named(tmp_path: Path, name: str, changed: dict[str, object]) -> None:
    file = save_board(tmp_path)
    for expert in ("resistor", "chip"):
        settings = tmp_path / "experts" / expert / name
        settings.write_text(json.dumps(json.loads(settings.read_text()) | changed))
    with pytest.raises(CorruptCheckpoint, match=r"board\.toml: experts\.resistor: it can not compute a sample"):
        CollaborationRuntime(ServingConfig(file=file, cache_dir=tmp_path / "cache", executors=1))


@pytest.mark.parametrize("damaged", ["settings", "record"])
def test_with_a_profile_each_architecture_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    file = save_board(tmp_path)
    config = ServingConfig(file=file, cache_dir=tmp_path / "cache", executors=1)
    with CollaborationRuntime(config) as runtime:
        (tmp_path / "profile.json").write_bytes(dump_coe_profile(profile_of(runtime)))
    with CollaborationRuntime(config) as runtime:
        assert runtime.profile is not None
    if damaged == "settings":
        for expert in ("resistor", "chip"):
            settings = tmp_path / "experts" / expert / "preprocessor_config.json"
            settings.write_text(json.dumps(json.loads(settings.read_text()) | {"image_mean": [0.1, 0.2]}))
        with pytest.raises(CorruptCheckpoint, match=r"board\.toml: experts\.resistor: it can not compute a sample"):
            CollaborationRuntime(config)
    else:
        monkeypatch.setattr(PackFile, "read_into", altered)
        with pytest.raises(PackDamaged):
            CollaborationRuntime(config)


def altered(pack: PackFile, layer: int, expert: int, into: memoryview) -> int:
    raise PackDamaged("altered")


def profile_of(runtime: CollaborationRuntime, dtype: str = "float32") -> CoeProfile:
    """Made up."""
    names, experts = runtime.collaboration.graph.names, runtime.collaboration.experts
    keys = list(runtime.architectures)
    return CoeProfile(
        format=FORMAT,
        version=1,
        collaboration=runtime.collaboration.name,
        machine=machine_name(),
        architectures={key: ArchitectureProfile(model_class="m", record_bytes=1, dtype=dtype) for key in keys},
        experts={name: expert.architecture for name, expert in zip(names, experts, strict=True)},
        usage=dict.fromkeys(names, 0.5),
        kinds={
            "cpu": ExecutorsProfile(
                executors=1,
                memory_bytes=1 << 30,
                scheduling="pull",
                threads_by_executors={1: 1},
                architectures={key: profiled_costs(1.0, 1.0) for key in keys},
                trials={1: trial(1, 1 << 20)},
            )
        },
    )


def test_a_profile_of_another_dtype_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = save_board(tmp_path)
    config = ServingConfig(file=file, cache_dir=tmp_path / "cache", executors=1)
    with CollaborationRuntime(config) as runtime:
        (tmp_path / "other.json").write_bytes(dump_coe_profile(profile_of(runtime, "bfloat16")))
    with pytest.raises(InvalidConfig, match="was measured in bfloat16, and is to compute in float32"):
        CollaborationRuntime(replace(config, profile=tmp_path / "other.json"))


def test_auto_starts_with_a_profile_for_more_memory_than_is_free(tmp_path: Path) -> None:
    file = save_board(tmp_path)
    config = ServingConfig(file=file, cache_dir=tmp_path / "cache", executors=1, max_pixels=10_000, most_batch=4)
    with CollaborationRuntime(config) as runtime:
        whole, made = sum(runtime.sizes), profile_of(runtime)
    chosen = whole * 9 // 10
    kind = replaced(made.kinds["cpu"], memory_bytes=whole, trials={1: trial(2, chosen)})
    (tmp_path / "profile.json").write_bytes(dump_coe_profile(replaced(made, kinds={"cpu": kind})))
    images = decoded_bytes(10_000)
    for free in (whole, chosen):
        with CollaborationRuntime(config, available_bytes=images + free) as runtime:
            assert runtime.plan.preparing == images
            assert 0 <= free * chosen // whole - runtime.plan.experts < PAGE_BYTES
            assert runtime.plan.total <= images + free
            assert runtime.engine.alive


def test_a_damaged_record_is_measured_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails the requests that need it, not the start; unless no expert of its architecture can be read."""
    file = save_board(tmp_path)
    read_into, broken = PackFile.read_into, {0}

    def damaged(pack: PackFile, layer: int, expert: int, into: memoryview) -> int:
        if layer in broken:
            raise PackDamaged("altered")
        return read_into(pack, layer, expert, into)

    monkeypatch.setattr(PackFile, "read_into", damaged)
    config = ServingConfig(file=file, cache_dir=tmp_path / "cache", executors=1)
    with CollaborationRuntime(config) as runtime:
        assert runtime.engine.alive
    assert "experts.resistor can not be read: altered" in caplog.text
    broken.add(1)
    with pytest.raises(PackDamaged):
        CollaborationRuntime(config)


def test_a_wrong_profile_is_refused_where_it_was_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = save_board(tmp_path)
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(InvalidConfig, match=r"profile\.json"):
        CollaborationRuntime(
            ServingConfig(file=file, cache_dir=tmp_path / "cache", profile=tmp_path / "profile.json", executors=1)
        )
    with CollaborationRuntime(ServingConfig(file=file, cache_dir=tmp_path / "cache", executors=1)) as runtime:
        assert runtime.profile is None
    assert "goes without a profile" in caplog.text
