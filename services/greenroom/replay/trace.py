"""Routing traces: which experts each token was routed to, recorded once and replayed without the model.

The file format is described in docs/architecture/traces.md.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.policies.arrays import Counts, Keys
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.events import Phase

PREFILL_CHUNK = 256
"""Prompt rows of a sequence that run together where a trace does not say which did."""


class TraceError(GreenroomError):
    """A routing trace that can not be read or written, or that contradicts itself."""


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Recorded routing. Raises TraceError, naming the array, where it contradicts itself.

    ``experts[tokens, layers, k]``: what the routers picked, indices within the layer; the largest value of the
    array's type is no pick, where no expert has that number. Sequence ``i`` is rows
    ``seq_starts[i]:seq_starts[i+1]``, in the order of its positions. ``num_experts``: of every layer, or one for
    each; ``top_k``: the most picks of a row in each layer (None: ``k``). ``layer_ids``: each layer's number in the
    model.

    By token, None where it was not recorded: ``phase[tokens]``, values of Phase (None: all decoded); ``step[tokens]``,
    the forward in which the row ran, so that rows of one step ran together. By sequence: ``task``, ``request`` and
    ``arrival``, in seconds. Of the model: its name, and the bytes that an expert of each layer occupies.
    """

    experts: NDArray[np.integer]
    seq_starts: Counts
    num_experts: int | Counts
    layer_ids: Counts | None = None
    top_k: Counts | None = None
    phase: NDArray[np.uint8] | None = None
    step: Counts | None = None
    task: tuple[str, ...] | None = None
    request: tuple[str, ...] | None = None
    arrival: NDArray[np.float64] | None = None
    expert_bytes: int | Counts | None = None
    model: str = ""

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_picks()
        self._check_steps()

    @property
    def tokens(self) -> int:
        return len(self.experts)

    @property
    def sequences(self) -> int:
        return len(self.seq_starts) - 1

    @property
    def layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def experts_per_layer(self) -> Counts:
        return np.broadcast_to(np.asarray(self.num_experts, dtype=np.int64), (self.layers,))

    @property
    def no_pick(self) -> int | None:
        """The value that stands for no pick; None where every value of the type is an expert."""
        value = int(np.iinfo(self.experts.dtype).max)
        return value if value >= int(self.experts_per_layer.max()) else None

    def catalogue(self, *, expert_bytes: int | None = 1) -> Catalogue:
        """The experts of the traced model. A size of 1 makes every budget a number of slots; None takes the sizes
        that were recorded, the largest for all, as a slot has it. Raises TraceError where none were.
        """
        if expert_bytes is None:
            if self.expert_bytes is None:
                raise TraceError("this trace does not say how large an expert is")
            expert_bytes = int(np.max(self.expert_bytes))
        k = int(self.experts.shape[2])
        return Catalogue(
            "replay",
            experts_per_layer=self.experts_per_layer.tolist(),
            top_k=[k] * self.layers if self.top_k is None else self.top_k.tolist(),
            expert_bytes=[expert_bytes] * self.layers,
        )

    # -- files -----------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path) -> RoutingTrace:
        """Reads an ``.npz``; arrays of other names are ignored. Raises TraceError."""
        try:
            with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in (*_REQUIRED, *_OPTIONAL) if name in stored.files}
        except (OSError, ValueError, BadZipFile, zlib.error, EOFError, RuntimeError, MemoryError) as error:
            raise TraceError(f"{path} is no routing trace: {error}") from error
        try:
            return cls(**_from_arrays(arrays))
        except TraceError as error:
            raise TraceError(f"{path} is no routing trace: {error}") from error

    def save(self, path: Path) -> None:
        """Writes an ``.npz``, beside and renamed, so that a reader sees the old or the new. Raises TraceError."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            try:
                with partial.open("wb") as file:
                    with ZipFile(file, "w", ZIP_DEFLATED) as archive:
                        for name, array in _to_arrays(self).items():
                            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                                np.lib.format.write_array(member, array, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
        except OSError as error:
            raise TraceError(f"{path} can not be written: {error}") from error

    # -- steps -----------------------------------------------------------------------------------------------------

    def steps(
        self, *, concurrent: int = 1, tokens: int | None = None, prefill_chunk: int = PREFILL_CHUNK
    ) -> Iterator[TraceStep]:
        """Steps of ``concurrent`` running sequences, taken in file order; each has one decode row in a step, or one
        chunk of its prompt: the rows that ran together if that was recorded, else up to ``prefill_chunk``.

        A sequence that ends is replaced by the next one at once. Ends when ``tokens`` rows are used (None: all),
        in the midst of sequences if need be; the last step is cut short where it would exceed them.
        """
        if concurrent < 1:
            raise InvalidConfig("concurrent", concurrent, "at least 1")
        if prefill_chunk < 1:
            raise InvalidConfig("prefill_chunk", prefill_chunk, "at least 1")
        starts, ends = self.seq_starts[:-1].tolist(), self.seq_starts[1:].tolist()
        full = [(n, begin, end) for n, (begin, end) in enumerate(zip(starts, ends, strict=True)) if begin < end]
        if self.phase is None:
            return self._of_single_rows(iter(full), concurrent, self.tokens if tokens is None else tokens)
        chunks = iter((n, self._chunks(begin, end, prefill_chunk)) for n, begin, end in full)
        return self._of_chunks(chunks, concurrent, self.tokens if tokens is None else tokens)

    def recorded_steps(self, *, tokens: int | None = None) -> Iterator[TraceStep]:
        """The steps as they ran. Raises TraceError where that was not recorded."""
        if self.step is None:
            raise TraceError("this trace does not say which rows ran together")
        return self._as_recorded(self.step, self.tokens if tokens is None else tokens)

    def _of_single_rows(
        self, waiting: Iterator[tuple[int, int, int]], concurrent: int, left: int
    ) -> Iterator[TraceStep]:
        running: list[tuple[int, int, int]] = []
        decode = np.full(concurrent, Phase.DECODE, dtype=np.uint8)
        while left > 0:
            fresh = list(itertools.islice(waiting, concurrent - len(running)))
            running.extend(fresh)
            if not running:
                return
            rows = running[:left]
            numbers = np.array([number for number, _, _ in rows], dtype=np.int64)
            yield TraceStep(
                numbers,
                self.experts[[row for _, row, _ in rows]],
                decode[: len(rows)],
                tuple(number for number, _, _ in fresh),
                tuple(number for number, row, end in rows if row + 1 == end),
            )
            left -= len(rows)
            running = [(number, row + 1, end) for number, row, end in running if row + 1 < end]

    def _of_chunks(
        self, waiting: Iterator[tuple[int, Iterator[tuple[range, bool]]]], concurrent: int, left: int
    ) -> Iterator[TraceStep]:
        running: list[tuple[int, Iterator[tuple[range, bool]]]] = []
        while left > 0:
            fresh = list(itertools.islice(waiting, concurrent - len(running)))
            running.extend(fresh)
            if not running:
                return
            parts, ended = [], []
            for number, chunks in running:
                chunk, last = next(chunks)
                parts.append((number, chunk))
                if last:
                    ended.append(number)
            rows = np.concatenate([np.arange(chunk.start, chunk.stop) for _, chunk in parts])[:left]
            numbers = np.concatenate([np.full(len(chunk), number) for number, chunk in parts])[:left]
            over = set(ended)
            yield self._step_of(rows, numbers, tuple(number for number, _ in fresh), tuple(ended))
            left -= len(rows)
            running = [(number, chunks) for number, chunks in running if number not in over]

    def _chunks(self, begin: int, end: int, prefill_chunk: int) -> Iterator[tuple[range, bool]]:
        """Which rows of a sequence run in one step, one after the other, and whether they are its last."""
        assert self.phase is not None
        row = begin
        while row < end:
            stop = row + 1
            if self.phase[row] != Phase.DECODE:
                limit = end if self.step is not None else min(end, row + prefill_chunk)
                while (
                    stop < limit
                    and self.phase[stop] == self.phase[row]
                    and (self.step is None or self.step[stop] == self.step[row])
                ):
                    stop += 1
            yield range(row, stop), stop == end
            row = stop

    def _as_recorded(self, step: Counts, left: int) -> Iterator[TraceStep]:
        owner = np.repeat(np.arange(self.sequences), np.diff(self.seq_starts))
        order = np.argsort(step, kind="stable")
        bounds = np.flatnonzero(np.diff(step[order])) + 1
        first = np.zeros(self.tokens, dtype=np.bool_)
        last = np.zeros(self.tokens, dtype=np.bool_)
        full = self.seq_starts[:-1] < self.seq_starts[1:]
        first[self.seq_starts[:-1][full]] = True
        last[self.seq_starts[1:][full] - 1] = True
        for group in np.split(order, bounds) if len(order) else ():
            if left <= 0:
                return
            rows = group[:left]
            yield self._step_of(
                rows, owner[rows], tuple(owner[rows[first[rows]]].tolist()), tuple(owner[rows[last[rows]]].tolist())
            )
            left -= len(rows)

    def _step_of(self, rows: Counts, sequences: Counts, started: tuple[int, ...], ended: tuple[int, ...]) -> TraceStep:
        phases = np.full(len(rows), Phase.DECODE, dtype=np.uint8) if self.phase is None else self.phase[rows]
        return TraceStep(sequences, self.experts[rows], phases, started, ended)

    # -- checks ----------------------------------------------------------------------------------------------------

    def _check_shapes(self) -> None:
        experts, starts = self.experts, self.seq_starts
        if experts.dtype.kind not in "iu":
            raise TraceError(f"experts must be integers, not {experts.dtype}")
        if experts.ndim != 3 or 0 in experts.shape[1:]:
            raise TraceError(f"experts must be [tokens, layers, k], not of shape {experts.shape}")
        tokens, layers, k = experts.shape
        if starts.ndim != 1 or len(starts) < 1 or starts[0] != 0 or starts[-1] != tokens or (np.diff(starts) < 0).any():
            raise TraceError(f"seq_starts must rise from 0 to the number of tokens, {tokens}")
        for name, length, of in (
            ("layer_ids", layers, "layers"),
            ("top_k", layers, "layers"),
            ("phase", tokens, "tokens"),
            ("step", tokens, "tokens"),
            ("task", len(starts) - 1, "sequences"),
            ("request", len(starts) - 1, "sequences"),
            ("arrival", len(starts) - 1, "sequences"),
        ):
            value = getattr(self, name)
            if value is not None and np.shape(value) != (length,):
                raise TraceError(f"{name} must have one entry for each of the {length} {of}, not {np.shape(value)}")
        for name in ("num_experts", "expert_bytes"):
            value = getattr(self, name)
            if value is not None and (np.shape(value) not in ((), (layers,)) or np.min(value) < 1):
                raise TraceError(f"{name} must be one number, or one for each of the {layers} layers, all at least 1")
        if self.top_k is not None and not (0 <= self.top_k.min() <= self.top_k.max() <= k):
            raise TraceError(f"top_k must lie from 0 to k, {k}")
        if self.phase is not None and tokens and int(self.phase.max()) > max(Phase):
            raise TraceError(f"phase must be one of {', '.join(f'{int(p)} ({p.name.lower()})' for p in Phase)}")
        if self.arrival is not None and not np.isfinite(self.arrival).all():
            raise TraceError("arrival must be seconds")

    def _check_picks(self) -> None:
        experts = self.experts
        tokens, _, k = experts.shape
        if not tokens:
            return
        width = self.experts_per_layer
        if experts.min() < 0:
            raise TraceError("experts must not be negative")
        if (experts.max(axis=(0, 2)) < width).all():
            none = None
        else:
            none = np.zeros(experts.shape, dtype=np.bool_) if self.no_pick is None else experts == self.no_pick
            beyond = ((experts >= width[:, None]) & ~none).any(axis=(0, 2))
            if beyond.any():
                layer = int(beyond.argmax())
                raise TraceError(f"experts of layer {layer} must lie from 0 to {int(width[layer]) - 1}")
        for one, other in itertools.combinations(range(k), 2):
            same = experts[:, :, one] == experts[:, :, other]
            if none is not None:
                same &= ~none[:, :, one]
            if same.any():
                row, layer = map(int, np.argwhere(same)[0])
                raise TraceError(f"experts: row {row} picks an expert of layer {layer} twice")
        if self.top_k is not None:
            counts = np.full(self.layers, k) if none is None else (k - none.sum(axis=2)).max(axis=0)
            if (counts > self.top_k).any():
                layer = int((counts > self.top_k).argmax())
                raise TraceError(f"experts of layer {layer}: a row has more picks than its top_k, {self.top_k[layer]}")

    def _check_steps(self) -> None:
        if self.step is None or not self.tokens:
            return
        rises = np.diff(self.step)
        inside = np.ones(len(rises), dtype=np.bool_)
        borders = self.seq_starts[1:-1]
        inside[borders[(borders > 0) & (borders < self.tokens)] - 1] = False
        if (rises[inside] < 0).any():
            raise TraceError("step must not fall within a sequence")
        decode = np.ones(self.tokens, dtype=np.bool_) if self.phase is None else self.phase == Phase.DECODE
        if (inside & (rises == 0) & decode[1:]).any():
            raise TraceError("step: a decoded row runs in a step of its own, after those before it")


@dataclass(frozen=True, slots=True, eq=False)
class TraceStep:
    """One step of a replay: rows of ``sequences[T]`` in ``phases[T]`` with their ``picks[T, layers, k]``.

    ``started`` and ``ended``: sequences whose first and whose last rows are among them.
    """

    sequences: NDArray[np.int64]
    picks: NDArray[np.integer]
    phases: NDArray[np.uint8]
    started: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()


def groups(catalogue: Catalogue, steps: Iterator[TraceStep]) -> Iterator[Keys]:
    """The distinct experts that each layer of each step uses, as keys of ``catalogue``, in the order in which they
    count as used: as recorded where a step has one row, else ascending.
    """
    spans = list(zip(catalogue.first[:-1].tolist(), catalogue.experts_per_layer.tolist(), strict=True))
    for step in steps:
        if len(step.picks) == 1:
            keys = step.picks[0].astype(np.int64)
            for (first, width), picks in zip(spans, keys, strict=True):
                yield picks[picks < width] + first
            continue
        for layer, (first, width) in enumerate(spans):
            present = np.bincount(step.picks[:, layer].ravel(), minlength=width)[:width]
            yield present.nonzero()[0] + first


_REQUIRED = ("experts", "seq_starts", "num_experts")
_OPTIONAL = (
    "layer_ids", "top_k", "phase", "step", "task", "request", "arrival", "expert_bytes", "model"
)  # fmt: skip
_INTEGERS = ("seq_starts", "layer_ids", "top_k", "step")
_TEXTS = ("task", "request")


def _from_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Constructor arguments. Raises TraceError for what is missing or of a wrong type."""
    for name in _REQUIRED:
        if name not in arrays:
            raise TraceError(f"it has no array {name!r}")
    fields: dict[str, Any] = dict(arrays)
    for name, array in arrays.items():
        kinds = "U" if name in (*_TEXTS, "model") else "iuf" if name == "arrival" else "iu"
        if array.dtype.kind not in kinds:
            wanted = {"U": "text", "iuf": "numbers", "iu": "integers"}[kinds]
            raise TraceError(f"{name} must be {wanted}, not {array.dtype}")
        if name in _INTEGERS:
            fields[name] = array.astype(np.int64)
        elif name in ("num_experts", "expert_bytes"):
            fields[name] = int(array) if array.ndim == 0 else array.astype(np.int64)
        elif name == "phase":
            if array.size and not 0 <= int(array.min()) <= int(array.max()) <= max(Phase):
                raise TraceError(f"phase must lie from 0 to {max(Phase)}")
            fields[name] = array.astype(np.uint8)
        elif name == "arrival":
            fields[name] = array.astype(np.float64)
        elif name in _TEXTS:
            if array.ndim != 1:
                raise TraceError(f"{name} must have one entry a sequence")
            fields[name] = tuple(array.tolist())
        elif name == "model":
            fields[name] = str(array)
    return fields


def _to_arrays(trace: RoutingTrace) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {
        "experts": trace.experts,
        "seq_starts": trace.seq_starts,
        "num_experts": np.asarray(trace.num_experts),
        "layer_ids": np.arange(trace.layers) if trace.layer_ids is None else trace.layer_ids,
    }
    for name in ("top_k", "phase", "step", "arrival", "expert_bytes"):
        if (value := getattr(trace, name)) is not None:
            arrays[name] = np.asarray(value)
    for name in _TEXTS:
        if (texts := getattr(trace, name)) is not None:
            arrays[name] = np.array(texts, dtype=np.str_)
    if trace.model:
        arrays["model"] = np.array(trace.model)
    return arrays


def narrowest(picks: NDArray[np.integer], experts: int, most: int) -> NDArray[np.integer]:
    """``picks`` in the narrowest type for layers of up to ``most`` experts; at or above this layer's ``experts`` they
    become the type's largest value, which is no pick.
    """
    kind = np.uint8 if most <= 255 else np.uint16 if most <= 65535 else np.uint32
    return np.where(picks < experts, picks, np.iinfo(kind).max).astype(kind)
