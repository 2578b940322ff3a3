"""What the packed expert file of an MoE checkpoint is made of. ``checkpoints/pack_cache.py`` makes and finds it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch

from greenroom.checkpoints.pack_cache import LOCK_WAIT_S, Digest, OnBytes, PackChanged, find_or_make
from greenroom.checkpoints.read_ahead import ReadAhead, Wanted
from greenroom.checkpoints.shard_reader import ShardReader, typed
from greenroom.core.errors import InvalidConfig, UnsupportedModel
from greenroom.core.units import MIB
from greenroom.experts.pack.layout import FLOATS, PLAIN, PackLayer, PackManifest
from greenroom.experts.pack.pack_file import PackWriter, Weights
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, DoesNotFit, EncodesNumbers, ExpertFormat
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.conversion import ExpertPlan, Recipe

log = logging.getLogger(__name__)

CONVERSION_VERSION: Final = 1  # increased when the same tensors are to give another pack


_MAKING_BYTES: Final = 64 * MIB
"""Of records that are made at once. Making one takes a few times its bytes meanwhile."""


def resolve_dtype(checkpoint: Checkpoint, dtype: str = "auto") -> torch.dtype:
    """``auto`` is the checkpoint's own. Raises InvalidConfig for a dtype that experts can not have."""
    name = checkpoint.stored_dtype if dtype == "auto" else dtype
    if name not in FLOATS:
        raise InvalidConfig("dtype", name, f"use auto or one of {', '.join(sorted(FLOATS))}")
    return FLOATS[name]


def ensure_pack(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    cache_dir: Path | None = None,
    *,
    progress: bool | None = None,
    force: bool = False,
    lock_wait_s: float = LOCK_WAIT_S,
    expert_format: ExpertFormat = PLAIN_FORMAT,
    may_make: bool = True,
) -> Path:
    """The checkpoint's pack, found or made as ``find_or_make`` says. ``expert_format``: of its records.

    A layer with an expert that a format of encoded numbers has no room for stays plain. Its manifest says so.

    Needs constant memory, because it converts a few experts at a time. Raises UnsupportedModel or CorruptCheckpoint if
    the experts can not be made, PackError if the pack can not be.
    """
    plan = ExpertPlan(checkpoint, resolve_dtype(checkpoint, dtype), expert_format)
    return find_or_make(
        MoePackSource(plan), cache_dir, progress=progress, force=force, lock_wait_s=lock_wait_s, may_make=may_make
    )


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """An expert that is being made of so many stored ``tensors``."""

    layer: int
    expert: int
    tensors: int
    made: Future[dict[str, Weights]]


class _Makers:
    """Threads that make records, each by itself; a context manager.

    Torch would share an expert's small products between all cores. Its threads wait for each other by spinning, which
    where the cores have something else to do takes many times as long. Torch's number of threads is the process's, so
    it is set for as long as this is open, and then as it was.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(at_once, "record maker", torch.set_num_threads, (1,))

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._before)

    def make(self, work: Callable[..., dict[str, Weights]], *arguments: object) -> Future[dict[str, Weights]]:
        return self._pool.submit(work, *arguments)


class MoePackSource:
    """The experts of one MoE checkpoint; a ``PackSource``."""

    command = "greenroom pack"

    def __init__(self, plan: ExpertPlan) -> None:
        self._plan = plan
        self._dtype = str(plan.dtype).removeprefix("torch.")
        self.name = plan.checkpoint.name
        kept = "".join(f"-{own.name}" for own in dict.fromkeys(plan.formats) if own is not PLAIN_FORMAT)
        self.stem = f"{plan.checkpoint.config.model_type}{kept}-{self._dtype}"

    @property
    def files(self) -> Sequence[Path]:
        return sorted({tensor.shard for tensor in self._plan.stored})

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._plan.stored)

    def description(self) -> str:
        return f"{CONVERSION_VERSION}\n{self._plan.description()}"

    def manifest(self, digest: str, like: PackManifest | None = None) -> PackManifest:
        formats = list(self._plan.formats)
        for number, (own, found) in enumerate(zip(formats, () if like is None else like.layers, strict=False)):
            if found.format == PLAIN and isinstance(own, EncodesNumbers):
                formats[number] = PLAIN_FORMAT
        layers = tuple(
            PackLayer(layer.name, layer.experts, layer.top_k, own.record(layer), own.name)
            for layer, own in zip(self._plan.layers, formats, strict=True)
        )
        return PackManifest(self._plan.checkpoint.config.model_type, self._dtype, digest, layers)

    def digest(self, total: Digest, on_bytes: OnBytes) -> None:
        with ShardReader() as reader, ReadAhead(reader, self._wanted()) as stored:
            for number, layer in enumerate(self._plan.layers):
                for expert in range(layer.experts):
                    for _, weights in self._taken(stored, total, number, expert):
                        on_bytes(sum(weight.nbytes for weight in weights))
                    stored.give_back()

    def write(self, writer: PackWriter, total: Digest, on_bytes: OnBytes) -> None:
        layouts = [layer.layout for layer in self.manifest("").layers]
        joins: dict[Hashable, bool] = {}  # in most models the layers' recipes are of one build
        unfit: dict[int, str] = {}
        under_way: deque[_UnderWay] = deque()
        with ShardReader() as reader, ReadAhead(reader, self._wanted()) as stored, _Makers(self._at_once()) as makers:

            def finish() -> None:
                """Write the expert that was taken first."""
                one = under_way.popleft()
                made: dict[str, Weights] = {}
                try:
                    made = one.made.result()
                except DoesNotFit as error:
                    name = self._plan.layers[one.layer].name
                    unfit.setdefault(one.layer, f"expert {one.expert} of {name}: {error}")
                if not unfit:  # else only which other layers do not fit is of interest
                    writer.write(one.layer, one.expert, [made[spec.name] for spec in layouts[one.layer].tensors])
                stored.give_back(one.tensors)
                on_bytes(layouts[one.layer].nbytes)

            for number, layer in enumerate(self._plan.layers):
                for recipe in self._plan.recipes[number]:
                    if recipe.build not in joins:
                        joins[recipe.build] = self._plan.joins(recipe)
                joined: set[str] = set()
                if not isinstance(self._plan.formats[number], EncodesNumbers):
                    joined = {recipe.target for recipe in self._plan.recipes[number] if joins[recipe.build]}
                copied = all(one.target in joined and one.coded is None for one in self._plan.recipes[number])
                for expert in range(layer.experts):
                    taken = list(self._taken(stored, total, number, expert))
                    made = makers.make(self._made, taken, expert, joined, number not in unfit)
                    under_way.append(_UnderWay(number, expert, sum(len(weights) for _, weights in taken), made))
                    while len(under_way) > (0 if copied else makers.at_once):
                        finish()
            while under_way:
                finish()
        if unfit:
            for number, why in unfit.items():
                log.warning("%s; all experts of its layer stay as numbers", why)
                self._plan.keep_plain(number)
            raise PackChanged(f"{len(unfit)} layers of {self.name} are kept otherwise than was begun")

    def _made(
        self, taken: list[tuple[Recipe, list[torch.Tensor]]], expert: int, joined: set[str], fits: bool
    ) -> dict[str, Weights]:
        """An expert's record, of the weights that were taken. ``joined``: what consists of them as they are. Without
        ``fits`` they are only checked."""
        made: dict[str, Weights] = {}
        for recipe, weights in taken:
            self._plan.check(recipe, weights, expert)
            if recipe.target in joined:
                made[recipe.target] = weights
            elif fits:
                try:
                    made.update(self._plan.make(recipe, weights))
                except UnsupportedModel as error:
                    stored, _ = recipe.feeds[0].of(expert)
                    raise UnsupportedModel(f"{stored.name} in {stored.shard}: expert {expert}: {error}") from error
        return made

    def _at_once(self) -> int:
        """How many experts are made at once: one a core, and fewer where they are large."""
        largest = max(layer.layout.nbytes for layer in self.manifest("").layers)
        return max(1, min(torch.get_num_threads(), _MAKING_BYTES // largest))

    def _wanted(self) -> Iterator[Wanted]:
        """Where all experts' weights are stored, in the order in which they are packed."""
        for layer, recipes in zip(self._plan.layers, self._plan.recipes, strict=True):
            for expert in range(layer.experts):
                for recipe in recipes:
                    for feed in recipe.feeds:
                        yield feed.of(expert)

    def _taken(
        self, stored: ReadAhead, total: Digest, number: int, expert: int
    ) -> Iterator[tuple[Recipe, list[torch.Tensor]]]:
        """An expert's weights as stored in the checkpoint, recipe by recipe. ``total`` digests them.

        They are valid until ``stored`` is given them back.
        """
        for recipe in self._plan.recipes[number]:
            weights = []
            for feed in recipe.feeds:
                data = stored.take()
                total.update(data.numpy().data)
                weights.append(typed(data, *feed.of(expert), codes=recipe.storage is not None))
            yield recipe, weights
