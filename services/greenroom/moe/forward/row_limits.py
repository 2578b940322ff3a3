"""Up to how many rows the compiled products are used: measured, where it can not be known beforehand.

The compiled products read weights once for several rows. torch multiplies many rows by instructions for bf16, if the
processor has them. From how many rows torch is faster depends on the processor, the sizes of the weights, and the share
of Python in a step, which the lean decoder saves. So a few products and steps of the model are timed both ways.

Everything except ``measure`` is pure. Limits do not change while a model is loaded, so that equal batches give equal
bits. They are kept beside the pack, so that the next start computes the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from greenroom.core.files import write_whole
from greenroom.core.machine import processor_name
from greenroom.experts.all_resident import ResidentExperts
from greenroom.experts.pack.layout import ExpertWeights, PackLayer, PackManifest, RecordLayout
from greenroom.experts.pack.pack_file import PackFile
from greenroom.experts.source import Arriving
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.formats.expert_format import Expands
from greenroom.moe.formats.invented import invented_record
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.kernels.expert_hooks import hook_of
from greenroom.moe.kernels.expert_products import Grouped, NativeSum, PickedExpert, TorchSum
from greenroom.moe.kernels.experts_forward import expert_by_torch
from greenroom.moe.loading.load_model import LoadedMoE, attach
from greenroom.moe.native.rows import ANY_ROWS, NativeRows, RowLimits

FORMAT_VERSION = 1

PRODUCT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_ROWS = (2, 4, 8, 16, 32, 64)
PROMPT_ROWS = (8, 16, 32, 64, 128, 256)

BUDGET_S = 2.0
"""For each of the three measurements, about. If a step's measurement ends early, the product's limit holds for more
rows. If the product's ends early, torch computes more rows.
"""

_ROUNDS = 3
_PREFERRED = 1.1
"""How many times as fast torch has to be. The compiled products have a benefit, which is worth a tenth of the speed: a
text does not change with its company."""

_CONTEXT = 32
"""Tokens of each decoding sequence."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for ``rows`` rows, by the compiled products and by torch's."""

    rows: int
    compiled_s: float
    torch_s: float


def limit_of(timings: Sequence[Timing], most: int, beyond: int = 0) -> int:
    """The limit that loses least over all timings together, so that one bad timing does not decide.

    0: torch always wins. ``timings``: with ascending rows. If the compiled products win to the last timing, the limit
    is ANY_ROWS if that has ``most`` rows, and else ``beyond``, or the last timing's rows if they are more.
    """
    gains = [math.log(timing.torch_s * _PREFERRED / timing.compiled_s) for timing in timings]
    totals = [sum(gains[:count]) for count in range(len(gains) + 1)]
    taken = max(range(len(totals)), key=lambda count: (totals[count], count))
    if taken == 0:
        return 0
    last = timings[taken - 1].rows
    if taken < len(timings):
        return last
    return ANY_ROWS if last >= most else max(last, beyond)


def time_both(
    run: Callable[[int, bool], None],
    counts: Sequence[int],
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time ``run(rows, compiled)`` both ways in turns, and take the quickest of a few.

    Ends before a count that may exceed the budget. The first count is always timed.
    """
    timings: list[Timing] = []
    until = clock() + budget_s
    for rows in counts:
        if timings and clock() + (_ROUNDS + 1) * 2 * (timings[-1].compiled_s + timings[-1].torch_s) > until:
            break
        best = {True: math.inf, False: math.inf}
        for number in range(_ROUNDS + 1):
            for compiled in best:
                begin = clock()
                run(rows, compiled)
                if number:  # the first run makes code and touches pages
                    best[compiled] = min(best[compiled], clock() - begin)
        timings.append(Timing(rows, best[True], best[False]))
    return timings


class Measured(msgspec.Struct, frozen=True):
    """The measurements of a model on a machine, kept beside its pack."""

    of: str
    limits: RowLimits
    products: tuple[Timing, ...] = ()
    decoding: tuple[Timing, ...] = ()
    prompts: tuple[Timing, ...] = ()
    version: int = FORMAT_VERSION


_here: dict[str, Measured] = {}


def fixed_limits(asked: str) -> RowLimits | None:
    """From ``N`` or ``PRODUCT,DECODE,PROMPT``. None: ``auto`` or ``measure``. Raises ValueError for anything else."""
    if asked in ("auto", "measure"):
        return None
    numbers = [min(int(part), ANY_ROWS) for part in asked.split(",")]
    return RowLimits(*(numbers * 3 if len(numbers) == 1 else numbers))


def limits_for(loaded: LoadedMoE, ragged: RaggedModel, pack: PackFile, asked: str) -> RowLimits | None:
    """The limits of the model with this pack. ``asked``: as in WorkerConfig. None: it does not use compiled products.

    ``auto`` measures on a processor with instructions for bf16; on others the compiled products were faster with any
    number of rows. A model is measured once on a machine: the result is kept in this process and beside the pack.
    """
    native = ragged.native
    if native is None:
        return None
    fixed = fixed_limits(asked)
    if fixed is not None:
        return fixed
    if asked == "auto" and not native.multiplies_bf16:
        return RowLimits(ANY_ROWS, ANY_ROWS, ANY_ROWS)
    here = _identity(loaded, pack, native)
    path = limits_path(pack.path, here)
    found = _here.get(here) or _load(path, here) or measure(loaded, ragged, pack.manifest, here)
    kept = _load(path, here)
    if kept is None:
        _save(path, found)
    elif here not in _here:
        found = kept  # another process has measured meanwhile, and both must compute the same
    _here[here] = found
    return found.limits


def measure(
    loaded: LoadedMoE,
    ragged: RaggedModel,
    manifest: PackManifest,
    of: str = "",
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Measure now, with random experts. The model must have no source, and has none afterwards."""
    native = ragged.native
    assert native is not None
    invented = _Invented(loaded)
    largest = max(manifest.layers, key=lambda layer: layer.layout.nbytes)
    weights, module = invented.expert(largest), loaded.model.get_submodule(largest.name)
    expand, numbers, expanding_s = hook_of(module).expand, weights, 0.0
    with torch.inference_mode():
        if expand is not None:
            numbers, expanding_s = _expanded(expand, weights, clock)
        products = [
            replace(one, torch_s=one.torch_s + expanding_s)
            for one in time_both(_product(native, module, weights, numbers), PRODUCT_ROWS, clock=clock)
        ]
    if expand is not None:
        expand.release()
    product = limit_of(products, PRODUCT_ROWS[-1])
    if ragged.lean is None:
        return Measured(of, RowLimits(product, 0, 0), tuple(products))
    source = _SameExpert([[invented.expert(layer)] * layer.experts for layer in manifest.layers])
    attach(loaded, source)
    try:
        decoding = time_both(_steps(ragged, product, _decoding), DECODE_ROWS, clock=clock)
        prompts = time_both(_steps(ragged, product, _prompt), PROMPT_ROWS, clock=clock)
    finally:
        attach(loaded, None)
    decode = limit_of(decoding, DECODE_ROWS[-1], product)
    limits = RowLimits(product, decode, limit_of(prompts, PROMPT_ROWS[-1], product))
    return Measured(of, limits, tuple(products), tuple(decoding), tuple(prompts))


class _Invented:
    """Experts with random weights, one for all layers whose records are alike."""

    def __init__(self, loaded: LoadedMoE) -> None:
        self._layers = {layer.name: layer for layer in loaded.layers}
        self._formats = dict(zip(self._layers, loaded.formats, strict=True))
        self._made: dict[tuple[str, RecordLayout], ExpertWeights] = {}

    def expert(self, layer: PackLayer) -> ExpertWeights:
        key = layer.format, layer.layout
        if key not in self._made:
            own = self._formats[layer.name]
            self._made[key] = layer.layout.views(invented_record(own, self._layers[layer.name]))
        return self._made[key]


class _SameExpert(ResidentExperts):
    """All experts of a layer are the same one, in memory."""

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        experts = self._weights[layer]
        return contextlib.nullcontext([(int(e), experts[e]) for e in np.unique(picks) if e < len(experts)])


def _expanded(expand: Expands, weights: ExpertWeights, clock: Callable[[], float]) -> tuple[ExpertWeights, float]:
    """A record's numbers, and the seconds that making them takes. torch's products take so much longer, whatever their
    rows. It is timed here, since it would leave no time to measure more than a row or two."""
    expand(weights)  # the first time touches pages
    begin = clock()
    numbers = expand(weights)
    return numbers, clock() - begin


def _product(
    native: NativeRows, module: nn.Module, weights: ExpertWeights, numbers: ExpertWeights
) -> Callable[[int, bool], None]:
    """Runs one expert of an experts module. ``numbers``: the same weights for torch."""
    hidden = numbers[-1].shape[0]  # of the second projection, or of its bias
    inputs = torch.randn(PRODUCT_ROWS[-1], hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    scales, products = torch.ones(len(inputs), 1), hook_of(module).products
    compute = functools.partial(expert_by_torch, module)

    @functools.cache  # a layer makes one for all of its experts, whichever product computes them
    def sum_of(rows: int) -> NativeSum:
        grouped = Grouped.of(np.zeros((rows, 1), dtype=np.int64), 1)
        return NativeSum(inputs[:rows], scales[:rows], grouped, compute, native, products)

    def run(rows: int, compiled: bool) -> None:
        total = sum_of(rows)
        if not compiled:
            TorchSum.contribution(total, PickedExpert(0, rows, numbers))
            return
        with native.alone():
            total.contribution(PickedExpert(0, rows, weights))

    return run


def _steps(
    ragged: RaggedModel, product: int, chunks: Callable[[RaggedModel, int], list[Chunk]]
) -> Callable[[int, bool], None]:
    """Runs whole steps: by the compiled products without the modules, or by the modules with products up to a limit."""
    native = ragged.native
    assert native is not None

    def run(rows: int, compiled: bool) -> None:
        before = native.limits
        native.limits = RowLimits(ANY_ROWS, ANY_ROWS, ANY_ROWS) if compiled else RowLimits(product, 0, 0)
        try:
            ragged.forward(chunks(ragged, rows))
        finally:
            native.limits = before

    return run


def _decoding(ragged: RaggedModel, rows: int) -> list[Chunk]:
    context = min(_CONTEXT, ragged.max_positions - 1)
    store = KVStore(ragged.layout, rows * ragged.layout.nbytes(context + 1))
    kvs = [store.reserve(context + 1) for _ in range(rows)]
    for kv in kvs:
        kv.commit(context)
    tokens = [(7 * n + 3) % ragged.vocab_size for n in range(rows)]
    return [Chunk(n, [tokens[n]], kvs[n], prefill=False, wants_logits=True) for n in range(rows)]


def _prompt(ragged: RaggedModel, rows: int) -> list[Chunk]:
    rows = min(rows, ragged.max_positions)
    kv = KVStore(ragged.layout, ragged.layout.nbytes(rows)).reserve(rows)
    return [Chunk(0, [(7 * n + 3) % ragged.vocab_size for n in range(rows)], kv, prefill=True, wants_logits=True)]


def limits_path(pack: Path, of: str) -> Path:
    """A file for each of what may share a pack: threads, instruction sets, dense layers that are kept otherwise."""
    return pack.with_suffix(f".{xxhash.xxh3_64_hexdigest(of.encode())[:8]}.rows.json")


def _identity(loaded: LoadedMoE, pack: PackFile, native: NativeRows) -> str:
    """Of the model's shapes, the processor and what computes on it, greenroom's own products included. Not of the
    machine's name: a container has another one at each start, and replicas that share a pack are to compute alike.
    """
    manifest = pack.manifest
    dense = "".join(f" dense {name}" for name in loaded.dense_formats)
    return (
        f"{manifest.model_type} {manifest.dtype} {manifest.source_digest} {processor_name()} "
        f"{native.instruction_set} {torch.get_num_threads()} threads torch {torch.__version__} "
        f"greenroom {importlib.metadata.version('greenroom')}{dense}"
    )


def _load(path: Path, here: str) -> Measured | None:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError):
        return None
    return kept if kept.version == FORMAT_VERSION and kept.of == here else None


def _save(path: Path, measured: Measured) -> None:
    """If the folder can not be written to, the measurements serve this process alone."""
    with contextlib.suppress(OSError):
        write_whole(path, msgspec.json.format(msgspec.json.encode(measured), indent=2))
