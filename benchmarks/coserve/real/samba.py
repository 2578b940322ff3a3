"""Samba-CoE with `from_pretrained`, as the paper's baseline loads: one executor, first come first served, LRU."""

from __future__ import annotations

import io
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

from benchmarks.coserve.boards import role_of
from benchmarks.coserve.random_experts import CROP_PIXELS
from benchmarks.coserve.real.board import RealBoard, without_bars
from benchmarks.coserve.settings import Setting
from benchmarks.harness.disk import drop_cache
from benchmarks.harness.reporting.statistics import percentile
from greenroom.coe.dispatch.first_fill import dealt
from greenroom.coe.serving.serve_calls import Call
from greenroom.coe.simulation.simulate import Way

_LOADS: Final = 12


@dataclass
class Resident:
    """Models in memory, the least recently used one first. Whoever leaves leaves the page cache too."""

    real: RealBoard
    nbytes: int
    models: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    loads: int = 0
    load_s: float = 0.0
    dropping_s: float = 0.0
    """What the measurement takes, not the system: what leaves is dropped from the page cache too."""

    def fill(self) -> None:
        (first,) = dealt(self.real.board.usage, self.real.board.bytes_of, [self.nbytes])
        for expert in reversed(first):
            self.of(expert)
        self.loads, self.load_s = 0, 0.0

    def clock(self) -> float:
        return time.perf_counter() - self.dropping_s

    def of(self, expert: int) -> Any:
        if expert in self.models:
            self.models.move_to_end(expert)
            return self.models[expert]
        sizes = self.real.board.bytes_of
        while sum(sizes[one] for one in self.models) + sizes[expert] > self.nbytes:
            gone = next(iter(self.models))
            del self.models[gone]  # what a model maps can not be dropped
            began = time.perf_counter()
            drop_cache([self.real.folders[gone] / "model.safetensors"])
            self.dropping_s += time.perf_counter() - began
        began = time.perf_counter()
        model = AutoModelForImageClassification.from_pretrained(self.real.folders[expert], dtype=torch.float32).eval()
        self.models[expert] = model
        self.load_s += time.perf_counter() - began
        self.loads += 1
        return model


def loading_ms(real: RealBoard, nbytes: int, loads: int = _LOADS) -> float:
    """Median over types' experts that are not in memory, up to weights that a forward finds there, beyond what that
    forward takes. ``nbytes``: in which as many models are as while it serves, since each makes loading slower.

    Each was read before, as in rounds after the first: a disk may be behind a cache of its own.
    """
    resident, image = Resident(real, nbytes), torch.rand(1, 3, CROP_PIXELS, CROP_PIXELS)
    spent: list[float] = []
    with without_bars(), torch.inference_mode():
        resident.fill()
        absent = [expert for expert, folder in enumerate(real.folders)
                  if expert not in resident.models and role_of(folder.name) == "type"]  # fmt: skip
        for expert in np.random.default_rng(0).permutation(absent)[: loads + 1].tolist():
            file = real.folders[expert] / "model.safetensors"
            file.read_bytes()
            drop_cache([file])
            began = resident.clock()
            model = resident.of(expert)
            model(image)
            loaded = resident.clock()
            model(image)
            spent.append(1000 * (2 * loaded - began - resident.clock()))
    return statistics.median(spent[1:])


def served_by_samba(real: RealBoard, setting: Setting, ways: Sequence[Way]) -> dict[str, Any]:
    """As ``served`` has it, as far as there is such a figure. ``load_ms``: of `from_pretrained` alone; the weights are
    read when they are first used."""
    resident = Resident(real, setting.expert_bytes)
    most = [costs.by_executors[1].most for costs in real.board.costs]
    drop_cache([folder / "model.safetensors" for folder in real.folders])
    with without_bars():
        processor = AutoImageProcessor.from_pretrained(real.folders[0], backend="pil")
        resident.fill()
        calls = real.calls(ways)
        began = resident.clock()
        done, computed = _serve(ways, calls, most, resident, processor)
    due = [began + call.arrives_ms / 1000 for call in calls]
    latencies = [1000 * (end - at) for end, at in zip(done, due, strict=True)]
    total_s = max(done) - min(due)
    return {
        "per_s": len(calls) / total_s,
        "p50_s": percentile(latencies, 0.5) / 1000,
        "p99_s": percentile(latencies, 0.99) / 1000,
        "switches": resident.loads,
        "switches_of_a_memory": resident.loads,
        "load_ms": 1000 * resident.load_s / max(1, resident.loads),
        "batch": sum(len(way.experts) for way in ways) / computed,
    }


def _serve(
    ways: Sequence[Way], calls: Sequence[Call], most: Sequence[int], resident: Resident, processor: Any
) -> tuple[list[float], int]:
    """When each call has ended, and how many batches there were."""
    clock = resident.clock
    began = clock()
    arriving = deque(range(len(ways)))
    waiting: deque[tuple[int, int]] = deque()
    done = [0.0] * len(ways)
    batches, left = 0, len(ways)
    while left:
        while arriving and clock() >= began + ways[arriving[0]].arrives_ms / 1000:
            waiting.append((arriving.popleft(), 0))
        if not waiting:
            time.sleep(max(0.0, began + ways[arriving[0]].arrives_ms / 1000 - clock()))
            continue
        expert = ways[waiting[0][0]].experts[waiting[0][1]]
        batch = list(_first(waiting, ways, expert, most[expert]))
        images = [Image.open(io.BytesIO(_bytes_of(calls[number]))).convert("RGB") for number, _ in batch]
        with torch.inference_mode():
            logits = resident.of(expert)(**processor(images, return_tensors="pt")).logits
        logits.softmax(-1).max(-1)
        batches += 1
        for number, stage in batch:
            if stage + 1 < len(ways[number].experts):
                waiting.append((number, stage + 1))
            else:
                done[number] = clock()
                left -= 1
    return done, batches


def _first(waiting: deque[tuple[int, int]], ways: Sequence[Way], expert: int, most: int) -> Iterator[tuple[int, int]]:
    """Those at the front that need this expert, as the engine's own first come, first served takes them."""
    for _ in range(most):
        if not waiting:
            return
        number, stage = waiting[0]
        if ways[number].experts[stage] != expert:
            return
        yield waiting.popleft()


def _bytes_of(call: Call) -> bytes:
    assert isinstance(call.given, bytes)
    return call.given
