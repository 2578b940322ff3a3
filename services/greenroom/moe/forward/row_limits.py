"""Up to how many rows the compiled products are taken: measured where nobody can know it beforehand.

They read weights once for several rows, and torch multiplies many rows by instructions for bf16 where the processor has
them. Where one becomes faster than the other depends on the processor, on the sizes of the weights and on how much of a
step is Python, which the lean decoder spares. So a few products and a few steps of the model are timed both ways.

Pure but for ``measure``: timings come in, limits go out. A limit holds for a model as long as it is loaded, so that
equal batches come out equal to the bit, and is kept beside the pack, so that the next start computes alike.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.experts.all_resident import ResidentExperts
from greenroom.experts.pack.layout import PackManifest
from greenroom.experts.pack.pack_file import PackFile
from greenroom.experts.source import Arriving, ExpertWeights
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.load_model import LoadedMoE, attach
from greenroom.moe.products.native.rows import ANY_ROWS, NativeRows, RowLimits

FORMAT_VERSION = 1

PRODUCT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_ROWS = (2, 4, 8, 16, 32, 64)
PROMPT_ROWS = (8, 16, 32, 64, 128, 256)

BUDGET_S = 2.0
"""For each of the three measurements, about. Counts of a step's rows that it does not reach go by the product's limit,
those of a product's to torch.
"""

_ROUNDS = 3
_PREFERRED = 1.05
"""By how much torch has to be faster: a row of the compiled products comes out the same in any company."""

_CONTEXT = 32
"""Tokens of each sequence that decodes."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for so many rows, by the compiled products and by torch's."""

    rows: int
    compiled_s: float
    torch_s: float


def limit_of(timings: Sequence[Timing], most: int, beyond: int = 0) -> int:
    """Up to how many rows the compiled products are to be taken, so that all counts together lose least.

    ``timings`` ascend. 0 where it is none. Where it is all: ANY_ROWS if they reach ``most``, else ``beyond`` if that is
    more than the last count. One count that came out badly does not decide.
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
    """``run(rows, compiled)`` by turns, the quickest of a few counting; ends where the next count may not fit into what
    is left of the budget. The first count is always timed.
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
                if number:  # the first of each makes code and touches pages
                    best[compiled] = min(best[compiled], clock() - begin)
        timings.append(Timing(rows, best[True], best[False]))
    return timings


class Measured(msgspec.Struct, frozen=True):
    """What was measured for a model on a machine: kept beside its pack."""

    of: str
    limits: RowLimits
    products: tuple[Timing, ...] = ()
    decoding: tuple[Timing, ...] = ()
    prompts: tuple[Timing, ...] = ()
    version: int = FORMAT_VERSION


_here: dict[str, Measured] = {}


def fixed_limits(asked: str) -> RowLimits | None:
    """Of ``N`` or ``PRODUCT,DECODE,PROMPT``; None for ``auto`` and ``measure``. Raises ValueError for anything else."""
    if asked in ("auto", "measure"):
        return None
    numbers = [min(int(part), ANY_ROWS) for part in asked.split(",")]
    return RowLimits(*(numbers * 3 if len(numbers) == 1 else numbers))


def limits_for(loaded: LoadedMoE, ragged: RaggedModel, pack: PackFile, asked: str) -> RowLimits | None:
    """The limits of a model whose pack this is, ``asked`` as in WorkerConfig; None where nothing is compiled.

    ``auto`` measures where the processor multiplies bf16 itself; elsewhere the compiled products were the faster ones
    at every number of rows. Of one model on one machine it is measured once: kept in this process and beside the pack.
    """
    native = ragged.native
    if native is None:
        return None
    fixed = fixed_limits(asked)
    if fixed is not None:
        return fixed
    if asked == "auto" and not native.multiplies_bf16:
        return RowLimits(ANY_ROWS, ANY_ROWS, ANY_ROWS)
    path, here = limits_path(pack.path), _identity(pack, native)
    found = _here.get(here) or _load(path, here) or measure(loaded, ragged, pack.manifest, here)
    kept = _load(path, here)
    if kept is None:
        _save(path, found)
    elif here not in _here:
        found = kept  # of another process that measured meanwhile: they compute alike
    _here[here] = found
    return found.limits


def measure(loaded: LoadedMoE, ragged: RaggedModel, manifest: PackManifest, of: str = "") -> Measured:
    """Measure now, on experts of random weights. Nothing may be attached to the model, and nothing is afterwards."""
    native = ragged.native
    assert native is not None
    layout = max((layer.layout for layer in manifest.layers), key=lambda layout: layout.nbytes)
    weights = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    generator = torch.Generator().manual_seed(0)
    for tensor in weights:
        tensor.normal_(0.0, 0.02, generator=generator)
    with torch.inference_mode():
        products = time_both(_product(native, weights), PRODUCT_ROWS)
    product = limit_of(products, PRODUCT_ROWS[-1])
    if ragged.lean is None:
        return Measured(of, RowLimits(product, 0, 0), tuple(products))
    source = _SameExpert([[weights] * layer.experts for layer in manifest.layers])
    attach(loaded, source)
    try:
        decoding = time_both(_steps(ragged, product, _decoding), DECODE_ROWS)
        prompts = time_both(_steps(ragged, product, _prompt), PROMPT_ROWS)
    finally:
        attach(loaded, None)
    decode = limit_of(decoding, DECODE_ROWS[-1], product)
    limits = RowLimits(product, decode, limit_of(prompts, PROMPT_ROWS[-1], product))
    return Measured(of, limits, tuple(products), tuple(decoding), tuple(prompts))


class _SameExpert(ResidentExperts):
    """All experts of a layer are one, and in memory."""

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        experts = self._weights[layer]
        return contextlib.nullcontext([(int(e), experts[e]) for e in np.unique(picks) if e < len(experts)])


def _product(native: NativeRows, weights: ExpertWeights) -> Callable[[int, bool], None]:
    """One expert over rows."""
    up, down = weights
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(PRODUCT_ROWS[-1], up.shape[1], generator=generator).bfloat16()
    numbers, scales = np.arange(len(inputs)), np.ones(len(inputs), dtype=np.float32)
    out = torch.empty_like(inputs)

    def run(rows: int, compiled: bool) -> None:
        if compiled:
            native.experts([(up, down)], np.array([0, rows]), inputs, numbers, scales, out, add=False)
            return
        gate, inner = nn.functional.linear(inputs[:rows], up).chunk(2, dim=-1)
        nn.functional.linear(nn.functional.silu(gate) * inner, down)

    return run


def _steps(
    ragged: RaggedModel, product: int, chunks: Callable[[RaggedModel, int], list[Chunk]]
) -> Callable[[int, bool], None]:
    """Whole steps: all by the compiled products, without the modules, or by the modules with products up to a limit."""
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


def limits_path(pack: Path) -> Path:
    return pack.with_suffix(".rows.json")


def _identity(pack: PackFile, native: NativeRows) -> str:
    """Of the model's shapes, the processor and what computes on it, greenroom's own products included. Not of the
    machine's name: a container has another one at each start, and replicas that share a pack are to compute alike.
    """
    manifest = pack.manifest
    return (
        f"{manifest.model_type} {manifest.dtype} {manifest.source_digest} {_processor()} "
        f"{native.instruction_set} {torch.get_num_threads()} threads torch {torch.__version__} "
        f"greenroom {importlib.metadata.version('greenroom')}"
    )


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _load(path: Path, here: str) -> Measured | None:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError):
        return None
    return kept if kept.version == FORMAT_VERSION and kept.of == here else None


def _save(path: Path, measured: Measured) -> None:
    """A folder that can not be written to is no error: then it serves this process alone."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=2))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
