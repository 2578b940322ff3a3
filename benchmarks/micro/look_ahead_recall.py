"""How many of a layer's picks its router foresees on the rows of an earlier layer.

    python -m benchmarks.look_ahead_recall --prompts 60

On the bundled model and prompts of its five tasks, decoded rows only: with the norms of the two layers exchanged, and
with the rows as they are. With exchanged norms it also shows how often a pick of a given weight is right.
"""

from __future__ import annotations

import argparse
import contextlib
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.experts.all_resident import ResidentExperts
from greenroom.experts.copying.accelerator import Mark
from greenroom.experts.pack.pack_file import PackFile
from greenroom.experts.source import Arriving
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import attach, load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.routing.router_look_ahead import look_ahead_of
from greenroom.policies.base.events import ROUTER, Prediction, PredictionRequest

AHEAD = 3
BINS = 10


class Watching(ResidentExperts):
    """Asks at every layer for the next three, and compares with what their routers pick."""

    asks = frozenset({ROUTER})

    def watch(self) -> None:
        self.layers = len(self._weights)
        self.foreseen: dict[tuple[int, int], NDArray[np.float32]] = {}
        self.right = np.zeros(AHEAD, dtype=np.int64)
        self.picked = np.zeros(AHEAD, dtype=np.int64)
        self.seen, self.sure = np.zeros((AHEAD, BINS)), np.zeros((AHEAD, BINS))

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        self.layer = layer
        for ahead in range(1, AHEAD + 1):
            weights = self.foreseen.pop((layer, ahead), None)
            if weights is not None and len(picks) == 1:
                self._compare(ahead, weights[0], picks[0])
        return super().routed(layer, picks)

    def _compare(self, ahead: int, weights: NDArray[np.float32], picks: NDArray[np.int64]) -> None:
        best = np.argsort(-weights)[: len(picks)]
        self.right[ahead - 1] += len(set(best.tolist()) & set(picks.tolist()))
        self.picked[ahead - 1] += len(picks)
        bins = np.minimum((weights * BINS).astype(int), BINS - 1)
        self.seen[ahead - 1] += np.bincount(bins, minlength=BINS)
        self.sure[ahead - 1] += np.bincount(bins[picks], minlength=BINS)

    def take_request(self, kind: str) -> PredictionRequest | None:
        last = min(self.layer + 1 + AHEAD, self.layers)
        return PredictionRequest(ROUTER, (self.layer + 1, last)) if self.layer + 1 < last else None

    def answers_at_once(self, kind: str) -> None:
        pass

    def mark(self) -> Mark:
        raise RuntimeError("the CPU computes in order")

    def predicted(self, prediction: Prediction) -> None:
        start, stop = prediction.request.layers
        for layer, values in zip(range(start, stop), np.split(prediction.values, stop - start, axis=1), strict=True):
            self.foreseen[layer, layer - self.layer] = values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--cache", type=Path, default=None, help="where packs are kept")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    checkpoint = resolve(str(bundled_model_path()))
    loaded = load(checkpoint)
    with contextlib.closing(PackFile.open(ensure_pack(checkpoint, "auto", options.cache))) as pack:
        source = Watching.of_pack(pack)
    assert isinstance(source, Watching)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.folder)
    for exchange in (False, True):
        source.watch()
        attach(loaded, source)
        loaded.hooks.look_ahead = look_ahead_of(loaded.model, loaded.layers, source, exchange_norms=exchange)
        for sample in (one for task in TASKS for one in samples(task, options.prompts, seed=5)):
            encoded = tokenizer.apply_chat_template(
                [{"role": "user", "content": sample.prompt}],
                add_generation_prompt=True, return_dict=True, return_tensors="pt",
            )  # fmt: skip
            with torch.inference_mode():
                loaded.model.generate(**encoded, do_sample=False, max_new_tokens=32)
        recall = " ".join(f"{share:.3f}" for share in source.right / source.picked)
        print(f"{'norms exchanged' if exchange else 'rows as they are'}: recall 1..{AHEAD} layers ahead {recall}")
    for ahead in range(AHEAD):
        shares = " ".join(f"{share:.2f}" for share in source.sure[ahead] / np.maximum(source.seen[ahead], 1))
        print(f"{ahead + 1} ahead, picked by weight 0.0, 0.1, ...: {shares}")


if __name__ == "__main__":
    main()
