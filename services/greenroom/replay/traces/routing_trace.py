"""Routing traces: which experts each token was routed to, recorded once and replayed without the model.

The file format is described in docs/architecture/traces.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_file import LARGEST_VOCABULARY
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Counts
from greenroom.policies.base.events import Phase
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.replay.traces import meta_file, trace_file
from greenroom.replay.traces.steps import TraceRows, TraceStep
from greenroom.replay.traces.trace_file import TraceError

PREFILL_CHUNK = 256
"""Prompt rows of a sequence that run together where a trace does not say which did."""


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Recorded routing. Raises TraceError, naming the array, where it contradicts itself.

    ``experts[tokens, layers, k]``: the routers' picks, indices within the layer. The largest value of the array's type
    is no pick, where no expert has that number. Sequence ``i`` is rows ``seq_starts[i]:seq_starts[i+1]``, in the order
    of its positions. ``num_experts``: one number for every layer, or one for each. ``top_k``: the most picks of a row
    in each layer (None: ``k``). ``layer_ids``: each layer's number in the model.

    By token, None where not recorded: ``phase[tokens]``, values of Phase (None: all decoded); ``step[tokens]``, the
    forward in which the row ran; ``token[tokens]``, the id of the token that is the row's input. ``token_texts``: what
    each id stands for, where only texts were recorded and the ids are their numbers; the id after the last is the
    unknown token. None: ids of the model. By sequence: ``task``, ``request``, and ``arrival`` in seconds. Of the model:
    its name, the bytes that an expert of each layer occupies, and the first MoE layer of an encoder-decoder's decoder
    (0: it has no encoder).
    """

    experts: NDArray[np.integer]
    seq_starts: Counts
    num_experts: int | Counts
    layer_ids: Counts | None = None
    top_k: Counts | None = None
    phase: NDArray[np.uint8] | None = None
    step: Counts | None = None
    token: Counts | None = None
    token_texts: tuple[str, ...] | None = None
    task: tuple[str, ...] | None = None
    request: tuple[str, ...] | None = None
    arrival: NDArray[np.float64] | None = None
    expert_bytes: int | Counts | None = None
    model: str = ""
    decoder_start: int = 0

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
        """The value of no pick; None where every value of the type is an expert."""
        value = int(np.iinfo(self.experts.dtype).max)
        return value if value >= int(self.experts_per_layer.max()) else None

    def catalogue(self, *, expert_bytes: int | None = 1) -> Catalogue:
        """The experts of the traced model. A size of 1 makes every budget a number of slots. None takes the recorded
        sizes. Raises TraceError where none were recorded.
        """
        sizes = self.expert_bytes if expert_bytes is None else expert_bytes
        if sizes is None:
            raise TraceError("this trace does not say how large an expert is")
        k = int(self.experts.shape[2])
        return Catalogue(
            "replay",
            experts_per_layer=self.experts_per_layer.tolist(),
            top_k=[k] * self.layers if self.top_k is None else self.top_k.tolist(),
            expert_bytes=np.broadcast_to(sizes, self.layers).tolist(),
            decoder_start=self.decoder_start,
        )

    def part(self, start: int, stop: int | None = None) -> RoutingTrace:
        """The sequences of the slice ``start:stop``."""
        first, last, _ = slice(start, stop).indices(self.sequences)
        last = max(first, last)
        rows = slice(int(self.seq_starts[first]), int(self.seq_starts[last]))
        return replace(
            self,
            experts=self.experts[rows],
            seq_starts=self.seq_starts[first : last + 1] - rows.start,
            phase=None if self.phase is None else self.phase[rows],
            step=None if self.step is None else self.step[rows],
            token=None if self.token is None else self.token[rows],
            task=None if self.task is None else self.task[first:last],
            request=None if self.request is None else self.request[first:last],
            arrival=None if self.arrival is None else self.arrival[first:last],
        )

    # -- files -----------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path, *, tokens: bool = False) -> RoutingTrace:
        """Reads an ``.npz``; arrays of other names are ignored. Raises TraceError.

        ``tokens``: take them from the ``.meta.jsonl`` beside it where the file itself has none. A trace of which
        neither has them is read without.
        """
        try:
            found = cls(**trace_file.read(path))
        except TraceError as error:
            raise TraceError(f"{path} is no routing trace: {error}") from error
        if not tokens or found.token is not None:
            return found
        written = meta_file.read_tokens(meta_file.meta_beside(path), found.seq_starts)
        return found if written is None else replace(found, token=written.ids, token_texts=written.texts)

    def save(self, path: Path) -> None:
        """Writes an ``.npz``. It appears whole: a reader sees the old file or the new. Raises TraceError."""
        arrays: dict[str, NDArray[Any]] = {
            "experts": self.experts,
            "seq_starts": self.seq_starts,
            "num_experts": np.asarray(self.num_experts),
            "layer_ids": np.arange(self.layers) if self.layer_ids is None else self.layer_ids,
        }
        for name in ("top_k", "phase", "step", "token", "arrival", "expert_bytes"):
            if (value := getattr(self, name)) is not None:
                arrays[name] = np.asarray(value)
        for name in ("task", "request", "token_texts"):
            if (texts := getattr(self, name)) is not None:
                arrays[name] = np.array(texts, dtype=np.str_)
                if any(text.endswith("\0") for text in texts):
                    raise TraceError(f"{name}: one ends in a NUL, which arrays of text do not keep")
        if self.model:
            arrays["model"] = np.array(self.model)
        if self.decoder_start:
            arrays["decoder_start"] = np.array(self.decoder_start)
        trace_file.write(path, arrays)

    # -- steps -----------------------------------------------------------------------------------------------------

    def steps(
        self, *, concurrent: int = 1, tokens: int | None = None, prefill_chunk: int = PREFILL_CHUNK
    ) -> Iterator[TraceStep]:
        """Steps of ``concurrent`` running sequences, taken in file order.

        In a step each sequence has one decode row, or one chunk of its prompt: the rows that ran together if that was
        recorded, else up to ``prefill_chunk``. A sequence that ends is replaced by the next one at once. It ends after
        ``tokens`` rows (None: all), even within sequences or a step. Raises InvalidConfig for numbers below 1.
        """
        if concurrent < 1:
            raise InvalidConfig("concurrent", concurrent, "at least 1")
        if prefill_chunk < 1:
            raise InvalidConfig("prefill_chunk", prefill_chunk, "at least 1")
        return self._rows.side_by_side(concurrent, tokens, prefill_chunk)

    def recorded_steps(self, *, tokens: int | None = None) -> Iterator[TraceStep]:
        """The steps as they ran, up to ``tokens`` rows (None: all). Raises TraceError where they were not recorded."""
        if self.step is None:
            raise TraceError("this trace does not say which rows ran together")
        return self._rows.as_recorded(self.step, tokens)

    @property
    def _rows(self) -> TraceRows:
        return TraceRows(self.experts, self.seq_starts, self.phase, self.step, self.token)

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
            ("token", tokens, "tokens"),
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
        if self.token is not None and (wrong := (self.token < 0) | (self.token >= LARGEST_VOCABULARY)).any():
            raise TraceError(f"token of row {int(wrong.argmax())} must be an id from 0 to {LARGEST_VOCABULARY - 1:,}")
        if (texts := self.token_texts) is not None:
            if len(set(texts)) != len(texts):
                raise TraceError("token_texts must be distinct")
            if self.token is None or (tokens and int(self.token.max()) > len(texts)):
                raise TraceError(f"token_texts: there must be ids in token, from 0 to {len(texts)}, the unknown token")
        if not 0 <= self.decoder_start < layers:
            raise TraceError(f"decoder_start must be one of the {layers} layers, from 0")
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


def narrowest(picks: NDArray[np.integer], experts: int, most: int) -> NDArray[np.integer]:
    """``picks`` in the narrowest type for layers of up to ``most`` experts.

    An entry at or above this layer's ``experts`` becomes the type's largest value: no pick.
    """
    kind = np.uint8 if most <= 255 else np.uint16 if most <= 65535 else np.uint32
    return np.where(picks < experts, picks, np.iinfo(kind).max).astype(kind)
