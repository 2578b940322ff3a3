"""Memory for keys and values that can not be had costs the request that asked for it; a lost device costs the model."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

from greenroom.core.errors import ModelBroken
from greenroom.core.generation import FinishReason
from greenroom.experts.copying.device_errors import device_loss
from greenroom.moe.attention import kv_memory
from greenroom.moe.attention.kv_cache import KVAuditError, KVMemoryError, KVStore
from greenroom.moe.attention.kv_layout import KVLayout
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch import batch_engine
from greenroom.moe.batch.batch_loop import BatchLoop
from tests.contract.batching.harness import Answer, Driver, request
from tests.unit.batching.fake_model import LAYOUT, FakeModel, continuation

PAGES = 4096
NO_MEMORY: dict[str, Callable[[], Exception]] = {
    "allocator": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "mmap": lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
}


class Memory:
    """Of ``nbytes`` in all, and whatever else is in the way. ``asked``: how often some was asked for."""

    def __init__(self, nbytes: int, error: Callable[[], Exception]) -> None:
        self.nbytes = nbytes
        self.error = error
        self.asked = 0
        self.refused = 0
        self._allocate = kv_memory._lazy_memory
        self.store: KVStore | None = None

    def __call__(self, layout: KVLayout, nbytes: int) -> torch.Tensor:
        assert self.store is not None
        self.asked += 1
        if self.store.reserved_bytes + nbytes > self.nbytes:
            self.refused += 1
            raise self.error()
        return self._allocate(layout, nbytes)


def driver(monkeypatch: pytest.MonkeyPatch, memory: Memory, model: FakeModel | None = None) -> Driver:
    """Its KV budget is ten pages; ``memory`` has less."""
    made = Driver((model or FakeModel()).as_ragged(), kv_budget=10 * PAGES)
    memory.store = made.engine.kv
    monkeypatch.setattr(kv_memory, "_lazy_memory", memory)
    return made


@pytest.mark.parametrize("error", NO_MEMORY.values(), ids=NO_MEMORY)
def test_a_request_without_memory_waits_until_another_has_left(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    memory = Memory(2 * PAGES, error)
    d = driver(monkeypatch, memory)
    answers = [d.add(request(f"r{i}", (i, 7, 9), tokens)) for i, tokens in enumerate((4, 9, 5, 6))]
    for _ in range(3):
        d.step()
        assert (len(d.engine.running), len(d.engine.waiting)) == (2, 2)
    assert (memory.asked, memory.refused) == (3, 1), "it is not asked for again while none has been given back"
    assert [answer.number for answer in answers[2:]] == list(d.engine.waiting), "they keep their places"
    assert d.engine.snapshot().kv_free_bytes == 0, "the scheduler sends no request here for memory that can not be had"
    d.run()
    assert [answer.ids for answer in answers] == [
        continuation((i, 7, 9), tokens) for i, tokens in enumerate((4, 9, 5, 6))
    ]
    assert memory.refused <= len(answers), "once for each that left at most"
    stats = d.engine.snapshot()
    assert (stats.kv_shortages, stats.kv_free_bytes) == (memory.refused, 10 * PAGES)


def test_where_nothing_would_make_room_it_fails_alone_and_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(2 * PAGES, NO_MEMORY["allocator"])
    d = driver(monkeypatch, memory)
    small = d.add(request("small", (1, 2), 4))
    large = d.add(request("large", (5,) * 700, 20))  # three pages
    behind = d.add(request("behind", (3, 4), 4))
    d.step()
    assert (small.finished, large.finished) == (None, None)
    d.run()
    assert large.finished is not None
    assert large.finished.reason is FinishReason.FAILED
    error = large.finished.error or ""
    assert error.startswith("no memory could be had for the keys and values of 719 tokens (12 KiB)"), error
    assert "max_tokens" in error
    assert "--expert-memory" in error
    assert small.ids == continuation((1, 2), 4)
    assert behind.ids == continuation((3, 4), 4)
    assert memory.refused == 2, "while the small one ran, and alone"


def test_a_cancelled_one_makes_room_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    d = driver(monkeypatch, Memory(PAGES, NO_MEMORY["allocator"]))
    first, second = (d.add(request(name, (1, 2), 9)) for name in "ab")
    d.step()
    assert second.number in d.engine.waiting
    d.engine.cancel(first.number)
    d.run()
    assert second.ids == continuation((1, 2), 9)


def test_any_other_failure_of_a_reservation_is_the_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [ZeroDivisionError("a defect")]

    def breaks(layout: KVLayout, nbytes: int) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return allocate(layout, nbytes)

    allocate = kv_memory._lazy_memory
    monkeypatch.setattr(kv_memory, "_lazy_memory", breaks)
    d = Driver(FakeModel().as_ragged())
    bad, good = (d.add(request(name, (1, 2), 4)) for name in "ab")
    d.run()
    assert bad.finished is not None
    assert bad.finished.error == "internal error (ZeroDivisionError)"
    assert good.ids == continuation((1, 2), 4)


def test_a_store_is_short_until_a_reservation_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(PAGES, NO_MEMORY["mmap"])
    memory.store = store = KVStore(LAYOUT, 4 * PAGES)
    monkeypatch.setattr(kv_memory, "_lazy_memory", memory)
    first = store.reserve(1)
    with pytest.raises(KVMemoryError, match="of 2 tokens"):
        store.reserve(2)
    assert (store.short, store.free_bytes, store.reserved_bytes, len(store)) == (True, 0, PAGES, 1)
    assert not store.can_reserve(1)
    store.audit()
    store.release(first)
    assert (store.short, store.free_bytes) == (False, 4 * PAGES)
    memory.nbytes = 0
    with pytest.raises(KVMemoryError):
        store.reserve(1)
    assert not store.short, "nothing is out that could come back"
    store.audit()
    store.short = True
    with pytest.raises(KVAuditError, match="is short, and no reservation is out"):
        store.audit()


def test_a_step_that_does_not_fit_fails_only_requests_that_do_not_fit_alone_either() -> None:
    def before(chunks: Sequence[Chunk]) -> None:
        if sum(len(chunk.tokens) for chunk in chunks) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    d = Driver(FakeModel(before).as_ragged())
    small, large = d.add(request("small", (1, 2, 3), 4)), d.add(request("large", (1,) * 6, 4))
    d.run()
    assert small.ids == continuation((1, 2, 3), 4)
    assert large.finished is not None
    assert "not memory enough" in (large.finished.error or "")
    assert "--tokens-per-step" in (large.finished.error or "")


# -- a lost device -------------------------------------------------------------------------------------------


def lost_after(forwards: int) -> Callable[[Sequence[Chunk]], None]:
    left = [forwards]

    def before(chunks: Sequence[Chunk]) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise device_loss()

    return before


@pytest.mark.parametrize("together", [1, 3])
def test_a_lost_device_is_no_requests_failure(together: int) -> None:
    model = FakeModel(lost_after(2))
    d = Driver(model.as_ragged())
    answers = [d.add(request(f"r{i}", (i, 7, 9), 6)) for i in range(together)]
    d.step()
    d.step()
    with pytest.raises(ModelBroken, match="the device computes nothing any more"):
        d.step()
    assert len(model.forwards) == 3, "no request is tried alone on a device that is lost"
    assert all(answer.finished is None for answer in answers)
    assert [answer.ids for answer in answers] == [continuation((i, 7, 9), 2) for i in range(together)]


@pytest.mark.parametrize(("module", "step"), [(batch_engine, "sample_in_ram"), (kv_memory, "_lazy_memory")])
def test_nor_where_it_is_found_out_beside_the_forward(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: str
) -> None:
    """While tokens are sampled, and while memory for keys and values is asked for."""

    def lost(*_: object) -> None:
        raise device_loss()

    monkeypatch.setattr(module, step, lost)
    d = Driver(FakeModel().as_ragged())
    answer = d.add(request("a", (1, 2), 6))
    with pytest.raises(ModelBroken):
        d.step()
    assert answer.finished is None


def test_the_loop_ends_and_takes_nothing_more() -> None:
    d = Driver(FakeModel(lost_after(2)).as_ragged())
    loop = BatchLoop(d.engine).start()
    answer = Answer()
    loop.submit(request("a", (1, 2), 9), answer.take)
    loop._thread.join(20)
    assert not loop.alive
    assert isinstance(loop.failure, ModelBroken)
    assert answer.finished is not None
    assert (answer.ids, answer.finished.error) == (continuation((1, 2), 2), "the model has failed")
    with pytest.raises(ModelBroken):
        loop.stop()
