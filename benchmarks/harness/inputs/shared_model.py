"""One loaded model on which several expert engines take turns, and prompts for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.closing import Closing
from greenroom.core.model_profile import ModelProfile
from greenroom.experts.copying.disk_calibration import load_or_measure
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.engine import ExpertEngine, catalogue_of
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import attach, load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.routing.residual_maps import ResidualMaps
from greenroom.moe.routing.router_look_ahead import LookAhead
from greenroom.text import TextProcessor

KV_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt in tokens, with the only right answer, its end included."""

    task: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class SharedModel(Closing):
    """A model without its experts, and the pack with them. A context manager. ``profile`` confines rows, if given."""

    def __init__(self, folder: Path, profile: ModelProfile | None = None) -> None:
        checkpoint = resolve(str(folder))
        self.profile = profile
        self.text = TextProcessor.from_folder(checkpoint.folder)
        self.pack = PackFile.open(ensure_pack(checkpoint))
        self.loaded = load(checkpoint)
        self.model = RaggedModel(self.loaded.model, native=self.loaded.native)
        self.catalogue = catalogue_of(self.pack.manifest)
        link = load_or_measure(self.pack)
        self.hardware = RealHardware(None if link is None else link.reads)

    def ask(self, task: str, prompt: str, answer: str) -> Ask:
        rendered = self.text.chat.render([{"role": "user", "content": prompt}])
        encode = self.text.tokenizer.encode
        own = encode(answer, add_special_tokens=False)
        return Ask(
            task,
            tuple(encode(rendered, add_special_tokens=False)),
            (*own, *sorted(self.loaded.eos_token_ids)[:1]),
        )

    def attach(self, experts: ExpertEngine, maps: ResidualMaps | None = None) -> None:
        """From now on the model computes with this engine's experts. ``maps``: in the place of routers run ahead."""
        attach(self.loaded, experts)
        if isinstance(self.loaded.hooks.look_ahead, LookAhead):
            self.loaded.hooks.look_ahead.use(maps)
        self.model.source = experts

    def detach(self) -> None:
        """Let go of the engine that had it last."""
        attach(self.loaded, None)
        self.model.source = None

    @property
    def expert_bytes(self) -> int:
        return int(self.catalogue.bytes_of.max())

    def close(self) -> None:
        self.pack.close()


def run_at_once(batch: BatchEngine, count: int, at_once: int, begin: Callable[[int], None]) -> float:
    """Answer ``count`` prompts, ``at_once`` at a time; the next joins when one has ended. Returns the seconds.

    ``begin`` submits the prompt of a number, from 0 on.
    """
    waiting = deque(range(count))
    began = time.perf_counter()
    while waiting or batch.busy:
        while waiting and len(batch.waiting) + len(batch.running) < at_once:
            begin(waiting.popleft())
        if not batch.step() and batch.busy:
            raise RuntimeError("requests wait and the engine moves nothing: a defect of greenroom")
    return time.perf_counter() - began
