"""Copies between tiers fail, at once or after a layer has gone on to compute behind them. What comes out is what the
fully resident model makes, to the bit, and no slot is ever booked as holding what did not come.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from greenroom.core.errors import ModelBroken, TransferFailed
from greenroom.experts.copying.accelerator import Mark
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.copying.mover import Begun, Job, Mover
from greenroom.experts.copying.transfers import Copies
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import attach, load
from greenroom.moe.loading.packing import ensure_pack
from tests.contract.exactness.models import Model, batch_logits
from tests.contract.exactness.troubled_store import TroubledStore
from tests.contract.prepared_policies import LITERAL, prepared_policy, prepared_predictors
from tests.matrices import matrix
from tests.random_checkpoints import save_random

TIERS = ("disk, ram", "disk, host, ram", "disk, device", "disk, host, device")
MOST_FAILURES = 200
GARBAGE = 0x3C


class _Lost(RuntimeError):
    def __init__(self) -> None:
        super().__init__("injected: the bytes did not come")


class Losses:
    """Which copies are lost: a ``share`` of the first 60, drawn by ``seed``."""

    def __init__(self, seed: int, share: float = 1 / 3) -> None:
        self.lost = 0
        self._share = share
        self._left = 60
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def next(self) -> bool:
        with self._lock:
            self._left -= 1
            loses = self._left >= 0 and self._random.random() < self._share
            self.lost += loses
            return loses


class _Copy:
    """A mark. The copy is made when it is waited for. A lost one leaves garbage, and raises only in waiting threads."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, *, lost: bool) -> None:
        self._target, self._source, self._lost = target, source, lost
        self._made = False
        self._lock = threading.Lock()

    def make(self) -> None:
        with self._lock:
            if self._made:
                return
            if self._lost:
                self._target.fill_(GARBAGE)
            else:
                self._target.copy_(self._source)
            self._made = True

    def reached(self) -> bool:
        return self._made

    def wait(self) -> None:
        self.make()
        if self._lost:
            raise _Lost


class _Now:
    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class LossyDevice:
    """Its memory is RAM. It computes at once, whatever became of the copies that it waited for, as a GPU does."""

    def __init__(self, losses: Losses) -> None:
        self.device = torch.device("cpu")
        self._losses = losses

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def lock_pages(self, region: memoryview) -> Callable[[], None]:
        return lambda: None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        return _Copy(target, source, lost=self._losses.next())

    def mark(self) -> Mark:
        return _Now()

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, _Copy)
        mark.make()

    def beside(self, work: Callable[[], None]) -> Mark:
        work()
        return _Now()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    root = tmp_path_factory.mktemp("lossy")
    checkpoint = resolve(str(save_random("mixtral", root / "model", num_experts_per_tok=4)))
    pack = PackFile.open(ensure_pack(checkpoint, "float32", root / "cache"))
    loaded = load(checkpoint, "float32")
    made = Model(checkpoint.folder, loaded, RaggedModel(loaded.model, native=loaded.native), pack)
    with made.experts("100%", "lru"):
        made.resident_logits = batch_logits(made.ragged)
    yield made
    pack.close()


@matrix(
    1, policy=("lru", "look-ahead", "moe-infinity", "reuse", "duoserve", "expertflow", LITERAL), tiers=TIERS
)  # fmt: skip
def test_no_step_computes_with_bytes_that_did_not_come(
    model: Model, monkeypatch: pytest.MonkeyPatch, policy: str, tiers: str
) -> None:
    losses = Losses(seed=len(policy))
    copy = Copies.move

    def lossy(carrier: Copies, job: Job, part: int) -> int:
        if losses.next():
            carrier._device.record(job.target_slot).fill_(GARBAGE)
            raise _Lost
        return copy(carrier, job, part)

    monkeypatch.setattr(Copies, "move", lossy)
    store = TroubledStore(model.pack, lambda layer, expert: tiers == "disk, ram" and losses.next(), seed=1)
    catalogue = catalogue_of(model.pack.manifest)
    config = EngineConfig(
        catalogue.size // 3, catalogue.size // 4 if "host" in tiers else 0, transfer_timeout_s=20
    )  # fmt: skip
    hardware = RealHardware(accelerator=LossyDevice(losses) if "device" in tiers else None)
    made = prepared_policy(policy, catalogue)
    predictors = prepared_predictors(made, hardware.accelerator)
    experts = ExpertEngine(store, catalogue, made, config, hardware=hardware, predictors=predictors)
    attach(model.loaded, experts)
    model.ragged.source = experts
    forward = model.ragged.forward
    failed: list[str] = []

    def until_it_works(chunks: list[Chunk], *paths: Any) -> torch.Tensor:
        while True:
            try:
                return forward(chunks, *paths)
            except TransferFailed as error:
                failed.append(str(error))
                assert len(failed) < MOST_FAILURES
            finally:
                experts.audit(idle=True)

    monkeypatch.setattr(model.ragged, "forward", until_it_works)
    try:
        logits = batch_logits(model.ragged)
        experts.audit_idle()
        assert losses.lost > 5
        assert failed
        assert all("could not be had" in message and "injected" in message for message in failed)
        assert experts.counters.stall_seconds < 15, "a layer waited though nothing moved"
    finally:
        experts.close()
    for step, (ours, resident) in enumerate(zip(logits, model.resident_logits, strict=True)):
        assert torch.equal(ours, resident), f"step {step}"


@pytest.mark.parametrize("host_slots", [0, 6], ids=["disk, device", "disk, host, device"])
def test_a_mover_that_dies_after_an_expert_has_landed_breaks_the_step(
    model: Model, monkeypatch: pytest.MonkeyPatch, host_slots: int
) -> None:
    """The last layer has computed behind a copy whose end will never be known."""
    catalogue = catalogue_of(model.pack.manifest)
    hardware = RealHardware(accelerator=LossyDevice(Losses(0, share=0.0)))
    config = EngineConfig(catalogue.size, host_slots, transfer_timeout_s=20)
    experts = ExpertEngine(model.pack, catalogue, prepared_policy("lru", catalogue), config, hardware=hardware)
    experts.preload(range(catalogue.size - 1))
    dying, never = experts.movers[-1], threading.Event()
    end, forward = Mover._end, model.ragged.forward
    returned: list[torch.Tensor] = []

    def dies(mover: Mover, begun: Begun) -> None:
        if mover is dying and begun.job.expert == catalogue.size - 1:
            mover._carrier.finish(begun.job)
            never.wait(0.3)  # for the layer to compute, and the step to end if it does not ask
            raise ZeroDivisionError("a defect")
        end(mover, begun)

    def kept(chunks: list[Chunk], *paths: Any) -> torch.Tensor:
        returned.append(forward(chunks, *paths))
        return returned[-1]

    monkeypatch.setattr(Mover, "_end", dies)
    monkeypatch.setattr(model.ragged, "forward", kept)
    attach(model.loaded, experts)
    model.ragged.source = experts
    try:
        with pytest.raises(ModelBroken, match="a mover has died"):
            batch_logits(model.ragged)
        assert returned == []
    finally:
        experts.close()
