"""Whole models out of a real pack: the right bytes under several memories, and failures that stay where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import BudgetTooSmall, ModelBroken, PackDamaged
from greenroom.core.units import KIB, MIB
from greenroom.experts.bookkeeping.free_bytes import FreeBytes
from greenroom.experts.bookkeeping.ledger import LedgerError
from greenroom.experts.copying import disk_calibration
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.copying.model_link import ModelLink
from greenroom.experts.copying.scattered_reads import ScatteredReads
from greenroom.experts.model_memory import Landed, ModelMemory, catalogue_of_models
from greenroom.experts.pack.direct_io import DirectFile, ReadSettings, page_aligned
from greenroom.experts.pack.layout import DTYPES, PAGE_BYTES, PackLayer, PackManifest, RecordLayout, cut
from greenroom.experts.pack.pack_file import PackFile, PackWriter
from greenroom.policies.base.events import SequenceEnd
from greenroom.policies.placement.placement_policy import PendingRequest
from greenroom.policies.registry import create_policy

DEADLINE_S = 20.0
Described = tuple[str, tuple[int, ...], str]


def described(channels: int) -> list[Described]:
    """Some of what a convolutional network has: 9 × 4 × channels² bytes and small things."""
    return [
        ("conv1", (channels, channels, 3, 3), "float32"),
        ("bn.weight", (channels,), "float32"),
        ("bn.count", (), "int64"),
        ("conv2", (channels, channels, 3, 3), "bfloat16"),
        ("mask", (channels, 3), "bool"),
        ("nothing", (0, 4), "float32"),
        ("positions", (1, channels), "int64"),
        ("conv3", (2 * channels, channels, 3, 3), "float32"),
        ("bias", (3,), "float16"),
    ]


CHANNELS = (96, 128, 96, 64, 192, 96)
MANIFEST = PackManifest(
    "models", "float32", "d", tuple(PackLayer.of_model(f"m{n}", described(c)) for n, c in enumerate(CHANNELS))
)
SIZES = MANIFEST.sizes()


def tensors_of(expert: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(expert)
    return [
        torch.randint(0, 100, spec.shape, generator=random).to(DTYPES[spec.dtype])
        for spec in MANIFEST.layers[expert].layout.tensors
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "models.pack"
    with PackWriter(path, MANIFEST) as writer:
        for expert in range(len(SIZES)):
            writer.write(expert, 0, tensors_of(expert))
    return path


@pytest.fixture(params=[ReadSettings(), ReadSettings(MIB // 4, threads=3, depth=2)], ids=["whole", "in parts"])
def link(path: Path, request: pytest.FixtureRequest) -> Iterator[ModelLink]:
    pack = PackFile.open(path)
    link = ModelLink(pack, RealHardware(request.param))
    yield link
    link.close()
    pack.close()


def memory_on(link: ModelLink, nbytes: int, policy: str = "lru") -> ModelMemory:
    return ModelMemory(link, create_policy(policy, catalogue=catalogue_of_models(MANIFEST)), nbytes)


def fetched(memory: ModelMemory, *experts: int) -> None:
    for expert in experts:
        assert memory.fetch(expert)
    waits_for(memory, *experts)


def waits_for(memory: ModelMemory, *experts: int) -> None:
    missing = set(experts)
    while missing := {expert for expert in missing if not memory.has(expert)}:
        assert memory.wait(DEADLINE_S)
        assert all(one.error is None for one in memory.collect())


def check(memory: ModelMemory, expert: int) -> None:
    memory.hold(expert, [])
    for got, stored in zip(memory.weights(expert), tensors_of(expert), strict=True):
        assert torch.equal(got, stored)
        assert got.dtype == stored.dtype
    memory.release(expert)


def test_models_of_any_size_come_and_go_with_the_right_bytes(link: ModelLink) -> None:
    memory = memory_on(link, sum(SIZES) // 2)
    order = [0, 4, 1, 2, 5, 3, 4, 0, 1, 5, 2, 4, 3, 0]
    for expert in order:
        fetched(memory, expert)
        memory.audit()
        for one in memory.residents.tolist():
            check(memory, one)
    counted = memory.counters
    assert counted.loads > len(SIZES)
    assert counted.evictions == counted.loads - len(memory.residents)
    assert counted.bytes_loaded == link.bytes_moved
    memory.close()


def test_two_memories_share_a_link_and_may_hold_the_same_model(link: ModelLink) -> None:
    first, second = memory_on(link, sum(SIZES)), memory_on(link, sum(SIZES))
    for expert in (0, 1):
        assert first.fetch(expert)
        assert second.fetch(expert)
    waits_for(first, 0, 1)
    waits_for(second, 0, 1)
    for memory in (first, second):
        check(memory, 0)
        check(memory, 1)
    assert first.weights is not second.weights


def test_the_first_fill_takes_what_fits_in_its_order(link: ModelLink) -> None:
    memory, told = memory_on(link, SIZES[4] + SIZES[0] + SIZES[3]), list[int]()
    assert memory.fill([4, 1, 0, 3, 5], told.append) == []
    assert memory.residents.tolist() == [0, 3, 4]
    assert sorted(told) == sorted([SIZES[4], SIZES[0], SIZES[3]])
    for expert in (0, 3, 4):
        check(memory, expert)
    assert memory.counters.loads == 0
    with pytest.raises(LedgerError):
        memory.fill([2])


def test_after_the_first_fill_the_least_wanted_leaves_first(link: ModelLink) -> None:
    memory = memory_on(link, max(SIZES))
    assert memory.fill([2, 5, 0, 3]) == []
    assert memory.residents.tolist() == [0, 2, 3, 5]
    fetched(memory, 1)
    assert memory.residents.tolist() == [1, 2, 5]


def test_an_altered_record_fails_its_expert_and_nothing_else(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "altered.pack"
    data = bytearray(path.read_bytes())
    data[sum(SIZES[:2]) + 2 * PAGE_BYTES + SIZES[2] // 2] ^= 1  # within record 2, whatever the header takes
    copy.write_bytes(data)
    pack = PackFile.open(copy)
    link = ModelLink(pack)
    memory = memory_on(link, sum(SIZES))
    (lost,) = memory.fill([0, 2, 1])
    assert lost.expert == 2
    assert isinstance(lost.error, PackDamaged)
    assert memory.residents.tolist() == [0, 1]
    assert memory.fetch(2)
    assert memory.fetch(3)
    ended: list[Landed] = []
    while len(ended) < 2:
        assert memory.wait(DEADLINE_S)
        ended += memory.collect()
    assert {one.expert: type(one.error) for one in ended} == {2: PackDamaged, 3: type(None)}, "in whatever order"
    assert memory.counters.failed_loads == 2
    memory.audit()
    memory.close()
    link.close()
    pack.close()


def test_a_dead_mover_is_found_out(link: ModelLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScatteredReads, "begin", lambda *_: 1 // 0)
    memory = memory_on(link, sum(SIZES))
    assert memory.fetch(0)
    assert memory.wait(DEADLINE_S)
    with pytest.raises(ModelBroken):
        memory.collect()


def test_the_owner_is_told_when_a_read_has_ended(path: Path) -> None:
    told = threading.Event()
    pack = PackFile.open(path)
    link = ModelLink(pack, on_posted=told.set)
    memory = memory_on(link, sum(SIZES))
    memory.fetch(0)
    assert told.wait(DEADLINE_S)
    assert [one.expert for one in memory.collect()] == [0]
    link.close()
    pack.close()


def test_too_little_memory_names_the_expert_and_the_least(link: ModelLink) -> None:
    with pytest.raises(BudgetTooSmall, match="expert m4 alone takes"):
        memory_on(link, SIZES[4] - 1)
    memory_on(link, SIZES[4]).close()


def test_a_memory_is_closed_after_the_reads_into_it(link: ModelLink) -> None:
    first, second = memory_on(link, sum(SIZES)), memory_on(link, sum(SIZES))
    for memory in (first, second):
        for expert in range(len(SIZES)):
            memory.fetch(expert)
    second.close()
    assert second.loading == 0
    waits_for(first, *range(len(SIZES)))


def test_misuse_is_refused(link: ModelLink) -> None:
    memory = memory_on(link, sum(SIZES))
    fetched(memory, 0)
    request = PendingRequest("a", 0.0, 1, 1, 1, 9.0, expert=1)
    memory.waits(request)
    for wrong in (
        lambda: memory.weights(0),
        lambda: memory.release(0),
        lambda: memory.hold(1, []),
        lambda: memory.hold(0, [request]),
        lambda: memory.waits(request),
        lambda: memory.landed(3),
        lambda: memory.failed(3, "so"),
    ):
        with pytest.raises(LedgerError):
            wrong()
    memory.forget(request, SequenceEnd.CANCELLED)
    with pytest.raises(LedgerError):
        memory.forget(request, SequenceEnd.CANCELLED)
    memory.audit()


def test_a_read_goes_into_more_pieces_than_one_call_takes(tmp_path: Path) -> None:
    path, pages = tmp_path / "file", 2500
    path.write_bytes(bytes(at // PAGE_BYTES % 251 for at in range(pages * PAGE_BYTES)))
    file, memory = DirectFile(path), page_aligned(pages * PAGE_BYTES)
    order = list(range(1, pages))
    Random(0).shuffle(order)
    pieces = [memory[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in order]
    file.read_into(PAGE_BYTES, *pieces, memory[:0])
    assert [piece[0] for piece in pieces] == [number % 251 for number in range(1, pages)]
    with pytest.raises(EOFError):
        file.read_into(PAGE_BYTES, *pieces, memory[:PAGE_BYTES])
    file.close()


def test_a_pack_of_layers_is_refused() -> None:
    layers = (PackLayer("a", 2, 1, RecordLayout.of([("w", (4,), "float32")])),)

    class Store:
        manifest = PackManifest("mixtral", "float32", "d", layers)

    with pytest.raises(ValueError, match="one expert a layer"):
        ModelLink(Store())  # type: ignore[arg-type]


def test_how_a_pack_of_models_is_read_best_can_be_measured(path: Path) -> None:
    pack = PackFile.open(path)
    link = disk_calibration.measure(pack, [ReadSettings(), ReadSettings(MIB, threads=2)], budget_s=0.05)
    assert link.record_bytes == max(SIZES)
    pack.close()


sizes = st.lists(st.tuples(st.integers(0, 5 * KIB), st.sampled_from(sorted(DTYPES))), min_size=1, max_size=30)


@given(sizes, st.sampled_from([PAGE_BYTES, 3 * PAGE_BYTES, 5000]))
def test_a_record_is_cut_at_tensors_into_whole_pages(tensors: list[tuple[int, str]], least: int) -> None:
    described = [(str(n), (size,), dtype) for n, (size, dtype) in enumerate(tensors)]
    layout = RecordLayout.of(described, piece_bytes=least)
    pieces = layout.pieces(least)
    assert sum(pieces) == layout.nbytes
    assert all(piece % PAGE_BYTES == 0 for piece in pieces)
    assert len(pieces) == 1 or min(pieces) >= least
    assert len(pieces) >= len(cut([spec.nbytes for spec in layout.tensors], least)), "all cuts are of use"
    ends = [sum(pieces[: n + 1]) for n in range(len(pieces))]
    for spec in layout.tensors:
        assert spec.offset % 64 == 0
        assert not any(spec.offset < end < spec.offset + spec.nbytes for end in ends)
    plain = RecordLayout.of(described)
    assert plain.nbytes <= layout.nbytes <= plain.nbytes + len(pieces) * PAGE_BYTES
    _check_disjoint(layout)


def _check_disjoint(layout: RecordLayout) -> None:
    at = 0
    for spec in layout.tensors:
        assert spec.offset >= at
        at = spec.offset + spec.nbytes
    assert at <= layout.nbytes


def test_padding_of_other_packs_is_as_before() -> None:
    layout = RecordLayout.of([("a", (5,), "float32"), ("b", (3 * MIB,), "bfloat16"), ("c", (1,), "float32")])
    assert [spec.offset for spec in layout.tensors] == [0, 64, 64 + 6 * MIB]
    assert layout.nbytes == 6 * MIB + PAGE_BYTES


def test_free_bytes_are_counted() -> None:
    room = FreeBytes(10)
    assert room.take(1, [4, 2]) == []
    assert room.take(2, [5]) is None
    bring_back = room.as_it_is()
    room.give_back(1)
    assert room.take(2, [10]) == []
    bring_back()
    room.audit()
    assert (list(room.owners), room.free) == ([1], 4)
    misuse: Sequence[tuple[object, ...]] = [(room.take, 1, [1]), (room.give_back, 7)]
    for call, *args in misuse:
        with pytest.raises(LedgerError):
            call(*args)  # type: ignore[operator]
    room.free = 5
    with pytest.raises(LedgerError):
        room.audit()
