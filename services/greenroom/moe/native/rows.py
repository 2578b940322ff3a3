"""The compiled products, called with tensors.

torch multiplies one bf16 row at half to three quarters of the speed of reading the weights. With more rows it is slower
still on a processor without instructions for bf16 (docs/decisions/0015). These kernels read the weights once for
several rows and sum in fp32, so that only memory limits them.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.moe.native.library import NativeUnavailable, native_library

INSTRUCTIONS: Final = "GREENROOM_INSTRUCTIONS"
"""The environment variable with the fastest instruction set to compute with: to test what runs on another machine. To
compute as that one does, fix the rows that go by the compiled products too: what is measured here is this machine's."""
_OF_ARM: Final = ("neonbf16", "neon")
_OF_OTHERS: Final = ("avx512bf16", "avx512", "avx2", "plain")
ALL_INSTRUCTION_SETS: Final = _OF_OTHERS + _OF_ARM
"""By architecture, the fastest first."""


def lowered(found: tuple[str, ...], fastest: str | None) -> tuple[str, ...]:
    """Of the sets ``found`` those that are not faster than ``fastest`` (None or "": all of them).

    Raises InvalidConfig for a name that is none of this architecture, and NativeUnavailable where none is left.
    """
    if not fastest:
        return found
    known = _OF_ARM if found[0] in _OF_ARM else _OF_OTHERS
    if fastest not in known:
        raise InvalidConfig(INSTRUCTIONS, fastest, f"allowed: {', '.join(known)}")
    left = known[known.index(fastest) :]
    kept = tuple(one for one in found if one in left)
    if not kept:
        raise NativeUnavailable(f"{INSTRUCTIONS} is {fastest}, and the slowest that is compiled is {found[-1]}")
    return kept


class LinearWeights(ctypes.Structure):
    """A linear layer: addresses (None: there is none), outputs, and how its weights are stored.

    ``format``: 0 is bf16, else the number of the codes' format, from 1 on. ``group``: see GroupedCodes.
    ``NativeRows.linear_weights`` makes it. The caller keeps the tensors alive.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "minimums", "order", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "format", "group")),
    )


class AttentionWeights(ctypes.Structure):
    """The weights of one decoder layer around its attention: projections, addresses (None: there is none), widths,
    epsilons.

    ``before`` and ``after``: the norms before and after attention. A norm of heads is as wide as one head, or as all of
    them. The caller keeps the tensors alive.
    """

    _fields_ = (
        *((name, LinearWeights) for name in ("query", "key", "value", "output")),
        *((name, ctypes.c_void_p) for name in ("before", "query_norm", "key_norm", "after")),
        *((name, ctypes.c_int64) for name in ("hidden", "dim", "query_norm_width", "key_norm_width")),
        *((name, ctypes.c_float) for name in ("before_epsilon", "query_epsilon", "key_epsilon", "after_epsilon")),
    )


class Lasting:
    """An array with its address. Asking numpy for the address takes as long as a small product."""

    __slots__ = ("array", "at")

    def __init__(self, array: NDArray[Any]) -> None:
        """Keeps the array alive. It must not be resized."""
        self.array = np.ascontiguousarray(array)
        self.at: int = self.array.ctypes.data


def _at(values: NDArray[Any] | Lasting) -> int:
    return values.at if type(values) is Lasting else np.asarray(values).ctypes.data


class RowLimits(NamedTuple):
    """Up to how many rows the compiled kernels are used: in one product, in a step of single rows (by the lean
    decoder), and in any other step. With more rows torch is used, and the model's own modules.
    """

    product: int
    decode: int
    prompt: int


class ClampedGate(NamedTuple):
    """gpt-oss's activation: ``(up + 1) * gate * sigmoid(alpha * gate)``.

    ``gate`` is at most ``limit``, and ``up`` within ±``limit``.
    """

    alpha: float
    limit: float


class GroupedCodes(NamedTuple):
    """How the products compute one matrix.

    ``name``: the format's in ``grouped_formats.inc``. ``group``: inputs that share a scale; 0: all. ``ordered``:
    whether a record has a last tensor that says which input each of the matrix's is (int32).
    """

    name: str
    group: int = 0
    ordered: bool = False


class GroupedMatrix(NamedTuple):
    """A matrix in codes. ``tensors``: codes, scales, and minimums and an order where there are such, as in a record."""

    codes: GroupedCodes
    outputs: int
    tensors: tuple[torch.Tensor, ...]


class GroupedExpert(NamedTuple):
    """SwiGLU experts in codes: how each matrix is computed, and the width between both."""

    up: GroupedCodes
    down: GroupedCodes
    inner: int


class LosslessExpert(NamedTuple):
    """SwiGLU experts whose matrices are kept as ``moe/formats/lossless/codes.py`` has them, or ``planes.py``,
    and the width between both."""

    planes: bool
    inner: int


class NativeRows:
    """The library, and up to how many rows a model uses it.

    All tensors are bf16 on the CPU, contiguous, with an even inner width. A row's result depends on that row and the
    weights alone, not on other rows and not on the threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        name = library.greenroom_instruction_set
        name.argtypes, name.restype = [ctypes.c_int64], ctypes.c_char_p
        self._numbers = {one.decode(): n for n, one in enumerate(iter(map(name, itertools.count()).__next__, None))}
        if not self._numbers:
            raise NativeUnavailable("this processor has neither AVX-512 nor AVX2")
        self.instruction_sets = lowered(tuple(self._numbers), os.environ.get(INSTRUCTIONS))
        """Those that this processor supports and INSTRUCTIONS allows, the fastest first."""
        self.use(self.instruction_sets[0])
        self.multiplies_bf16 = bool(library.greenroom_multiplies_bf16())
        """Whether the processor has instructions for it, which torch uses. The limits must then be measured."""
        self.has_tiles = bool(library.greenroom_has_tiles())
        """Whether the processor has AMX, by which torch multiplies many rows."""
        few = _ROWS_UNMEASURED if self.multiplies_bf16 else ANY_ROWS
        self.limits = RowLimits(few, few, few)
        self._alone = False
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._linear = library.greenroom_linear
        self._linear.argtypes = [pointer, pointer, pointer, pointer, count, count, count, ctypes.c_uint]
        self._linear.restype = None
        self._linear_layer = library.greenroom_linear_layer
        self._linear_layer.argtypes = [ctypes.POINTER(LinearWeights), pointer, pointer, count, count, ctypes.c_uint]
        self._linear_layer.restype = None
        self._experts = library.greenroom_experts
        self._experts.argtypes = [
            *(pointer, pointer, count, count, count, pointer),
            *(pointer, pointer, pointer, ctypes.c_int, ctypes.c_uint),
        ]
        self._experts.restype = None
        self._clamped_experts = library.greenroom_clamped_experts
        self._clamped_experts.argtypes = [
            *self._experts.argtypes[:-1],
            *(ctypes.c_float, ctypes.c_float, ctypes.c_uint),
        ]
        self._clamped_experts.restype = None
        self._mxfp4_experts = library.greenroom_mxfp4_experts
        self._mxfp4_experts.argtypes, self._mxfp4_experts.restype = self._clamped_experts.argtypes, None
        self._grouped_experts = library.greenroom_grouped_experts
        self._grouped_experts.argtypes = [pointer, *self._experts.argtypes]
        self._grouped_experts.restype = None
        grouped = library.greenroom_grouped_format
        grouped.argtypes, grouped.restype = [ctypes.c_int64], ctypes.c_char_p
        self._grouped = {one.decode(): n for n, one in enumerate(iter(map(grouped, itertools.count()).__next__, None))}
        self._lossless_experts = library.greenroom_lossless_experts
        self._lossless_experts.argtypes, self._lossless_experts.restype = [count, *self._experts.argtypes], None
        self._transpose_bytes = library.greenroom_transpose_bytes
        self._transpose_bytes.argtypes, self._transpose_bytes.restype = [pointer, count, count, count, pointer], None
        self._bit_panels = library.greenroom_bit_panels
        self._bit_panels.argtypes = [count, ctypes.c_int, pointer, count, count, pointer]
        self._bit_panels.restype = None
        self._spread_codes = library.greenroom_spread_codes
        self._spread_codes.argtypes = [count, pointer, count, count, count, count, pointer]
        self._spread_codes.restype = None
        self._lossless_encode = library.greenroom_lossless_encode
        self._lossless_encode.argtypes = [count, ctypes.c_int, pointer, count, count, count, pointer, pointer]
        self._lossless_encode.restype = count
        self._lossless_numbers = library.greenroom_lossless_numbers
        self._lossless_numbers.argtypes = [
            *(count, ctypes.c_int, pointer, pointer, count, count, pointer, ctypes.c_uint),
        ]
        self._lossless_numbers.restype = None
        self._all_experts = library.greenroom_all_experts
        self._all_experts.argtypes = [
            *(pointer, count, pointer, pointer, count, count),
            *(count, count, pointer, pointer, ctypes.c_uint),
        ]
        self._all_experts.restype = count
        self._all_grouped_experts = library.greenroom_all_grouped_experts
        self._all_grouped_experts.argtypes = [pointer, *self._all_experts.argtypes]
        self._all_grouped_experts.restype = count
        self._all_lossless_experts = library.greenroom_all_lossless_experts
        self._all_lossless_experts.argtypes = [count, *self._all_experts.argtypes]
        self._all_lossless_experts.restype = count
        self._add_rows = library.greenroom_add_rows
        self._add_rows.argtypes = [pointer, pointer, pointer, count, count]
        self._add_rows.restype = None
        self._route = library.greenroom_route
        self._route.argtypes = [
            *(pointer, pointer, count, count, count, count),
            *(ctypes.c_int, ctypes.c_int, pointer, pointer, ctypes.c_uint),
        ]
        self._route.restype = None
        self._route_confined = library.greenroom_route_confined
        self._route_confined.argtypes = [
            *(pointer, pointer, count, count, count, count, ctypes.c_int, ctypes.c_int),
            *(pointer, count, pointer, pointer, pointer, ctypes.c_uint),
        ]
        self._route_confined.restype = count
        self._linear_floats = library.greenroom_linear_floats
        self._linear_floats.argtypes = [pointer, pointer, pointer, count, count, count, ctypes.c_uint]
        self._linear_floats.restype = None
        self._rms_norm = library.greenroom_rms_norm
        self._rms_norm.argtypes = [pointer, pointer, pointer, count, count, ctypes.c_float]
        self._rms_norm.restype = None
        self._rotary = library.greenroom_rotary
        self._rotary.argtypes = [pointer, pointer, pointer, count, count, count]
        self._rotary.restype = None
        self._attention = library.greenroom_attention
        self._attention.argtypes = [
            *(pointer, pointer, pointer, pointer, count, pointer),
            *(count, count, count, count, ctypes.c_float, pointer, ctypes.c_uint),
        ]
        self._attention.restype = None
        layer = ctypes.POINTER(AttentionWeights)
        self._before_attention = library.greenroom_before_attention
        self._before_attention.argtypes = [
            *(layer, pointer, count, pointer, pointer),
            *(pointer, pointer, pointer, ctypes.c_uint),
        ]
        self._before_attention.restype = None
        self._after_attention = library.greenroom_after_attention
        self._after_attention.argtypes = [layer, pointer, count, pointer, pointer, count, ctypes.c_uint]
        self._after_attention.restype = None
        self.threaded = _lend_threads(library)

    def use(self, instruction_set: str) -> None:
        """From now on the whole process computes with these instructions. Nothing may be computing meanwhile.

        Raises InvalidConfig for a name that is not among ``instruction_sets``.
        """
        if instruction_set not in self.instruction_sets:
            raise InvalidConfig("instruction_set", instruction_set, f"here: {', '.join(self.instruction_sets)}")
        self._library.greenroom_use_instruction_set(ctypes.c_int64(self._numbers[instruction_set]))
        self.instruction_set = instruction_set
        self.attention_granularity: int = self._library.greenroom_attention_granularity()
        """The width of a head must be a multiple of this."""
        self.is_for_planes = bool(self._library.greenroom_is_for_planes())
        """Whether lossless planes are faster than lossless codes."""

    def for_a_model(self) -> NativeRows:
        """The same library with its own limits."""
        return copy.copy(self)

    @property
    def most_rows(self) -> int:
        """The present limit of one product."""
        return ANY_ROWS if self._alone else self.limits.product

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it the kernels compute all products, of any number of rows.

        So a step's result does not depend on whether an expert was resident and computed with others in one call, or
        came later.
        """
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def remove_limits(self) -> None:
        """From now on the kernels compute everything that they can."""
        self.limits = RowLimits(ANY_ROWS, ANY_ROWS, ANY_ROWS)

    @contextmanager
    def without_limits(self) -> Iterator[None]:
        """Within it the kernels compute everything that they can."""
        before = self.limits
        self.remove_limits()
        try:
            yield
        finally:
            self.limits = before

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``rows[R, inputs]`` through ``weight[outputs, inputs]``, plus ``bias[outputs]``: ``[R, outputs]``.

        Summed in fp32, rounded once.
        """
        count, inputs = rows.shape
        outputs = weight.shape[0]
        out = torch.empty(count, outputs, dtype=torch.bfloat16)
        threads = self._threads(outputs * inputs)
        self._linear(
            *(weight.data_ptr(), None if bias is None else bias.data_ptr(), rows.data_ptr(), out.data_ptr()),
            *(count, inputs, outputs, threads),
        )
        return out

    def linear_weights(self, weight: torch.Tensor | GroupedMatrix, bias: torch.Tensor | None = None) -> LinearWeights:
        """Of ``weight[outputs, inputs]`` in bf16, or of a matrix in codes, and ``bias[outputs]``."""
        address = None if bias is None else bias.data_ptr()
        if isinstance(weight, torch.Tensor):
            return LinearWeights(weights=weight.data_ptr(), bias=address, outputs=weight.shape[0])
        own, parts = weight.codes, [tensor.data_ptr() for tensor in weight.tensors]
        order = parts.pop() if own.ordered else None
        codes, scales, *minimums = parts
        return LinearWeights(
            *(codes, scales, minimums[0] if minimums else None, order, address),
            *(weight.outputs, self._grouped[own.name] + 1, own.group),
        )

    def linear_layer(self, rows: torch.Tensor, of: LinearWeights) -> torch.Tensor:
        """As ``linear``, of a layer that may be in codes: ``rows[R, inputs]`` to ``[R, outputs]``.

        Of codes a group's products are summed, then scaled.
        """
        (count, inputs), outputs = rows.shape, of.outputs
        out = torch.empty(count, outputs, dtype=torch.bfloat16)
        threads = self._threads(outputs * inputs)
        self._linear_layer(of, rows.data_ptr(), out.data_ptr(), count, inputs, threads)
        return out

    def linear_floats(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``rows[R, inputs]`` through ``weight[outputs, inputs]``, all of floats: ``[R, outputs]``."""
        (count, inputs), outputs = rows.shape, weight.shape[0]
        out = torch.empty(count, outputs)
        self._linear_floats(
            *(weight.data_ptr(), rows.data_ptr(), out.data_ptr(), count, inputs, outputs),
            self._threads(outputs * inputs),
        )
        return out

    def experts(
        self,
        weights: Sequence[tuple[torch.Tensor, ...]],
        starts: Sequence[int] | NDArray[np.int64],
        rows: torch.Tensor,
        tokens: NDArray[np.int64] | Lasting,
        scales: NDArray[np.float32] | Lasting,
        out: torch.Tensor,
        *,
        add: bool,
        first: int = 0,
    ) -> None:
        """``down · (silu(gate · row) * (up · row)) * scale`` by each of the experts over rows of ``rows[T, H]``.

        ``weights``: for each expert ``up[2 I, H]``, the gate first, and ``down[H, I]``. Expert e computes the rows
        ``tokens[first + starts[e] : first + starts[e + 1]]``, with the ``scales`` at the same indices. Intermediate
        results are rounded to bf16 as in transformers' eager experts. With ``add`` the results are added to the same
        rows of ``out[T, H]`` in the order of the experts, else written to the rows ``[starts[e], starts[e + 1])`` of
        ``out``.
        """
        hidden, inner = weights[0][1].shape
        self._swiglu(self._experts, hidden, inner, weights, starts, rows, tokens, scales, out, add, first)

    def lossless_experts(
        self,
        expert: LosslessExpert,
        weights: Sequence[tuple[torch.Tensor, ...]],
        starts: Sequence[int] | NDArray[np.int64],
        rows: torch.Tensor,
        tokens: NDArray[np.int64] | Lasting,
        scales: NDArray[np.float32] | Lasting,
        out: torch.Tensor,
        *,
        add: bool,
        first: int = 0,
    ) -> None:
        """As ``experts`` on the same weights in bf16, to the bit.

        ``weights``: for each expert codes and exponents of ``up``, and of ``down``.
        """
        products = functools.partial(self._lossless_experts, int(expert.planes))
        self._swiglu(products, rows.shape[1], expert.inner, weights, starts, rows, tokens, scales, out, add, first)

    def _swiglu(
        self,
        products: Any,
        hidden: int,
        inner: int,
        weights: Sequence[tuple[torch.Tensor, ...]],
        starts: Sequence[int] | NDArray[np.int64],
        rows: torch.Tensor,
        tokens: NDArray[np.int64] | Lasting,
        scales: NDArray[np.float32] | Lasting,
        out: torch.Tensor,
        add: bool,
        first: int,
    ) -> None:
        addresses = array("q", [tensor.data_ptr() for expert in weights for tensor in expert])
        begins = array("q", starts)
        products(
            *(addresses.buffer_info()[0], begins.buffer_info()[0], len(weights), hidden, inner, rows.data_ptr()),
            *(_at(tokens) + 8 * first, _at(scales) + 4 * first, out.data_ptr(), add),
            self._threads(3 * hidden * inner),
        )

    def transpose_bytes(self, matrices: torch.Tensor, into: torch.Tensor) -> None:
        """Write ``matrices[n, rows, columns]`` to ``into[n, columns, rows]``, both of bytes. On the calling thread."""
        self._transpose_bytes(matrices.data_ptr(), *matrices.shape, into.data_ptr())

    def bit_panels(self, codes: torch.Tensor, bits: int, into: torch.Tensor, *, joined: bool) -> None:
        """Write ``codes[outputs, inputs]``, a byte each, as ``bit_codes`` in ``moe/formats/panels.py`` says. On the
        calling thread."""
        self._bit_panels(bits, joined, codes.data_ptr(), *codes.shape, into.data_ptr())

    def spread_codes(self, rows: torch.Tensor, width: int, bits: int, into: torch.Tensor) -> None:
        """Write codes of 4 or 2 ``bits``, which lie side by side in ``rows[n, bytes]``, as a byte each. Of each
        ``width`` bytes come all lowest codes, then all next higher ones, and so on. Rows may lie apart. On the calling
        thread."""
        count, nbytes = rows.shape
        self._spread_codes(bits, rows.data_ptr(), count, rows.stride(0), nbytes, width, into.data_ptr())

    def lossless_encode(
        self,
        numbers: torch.Tensor,
        room: int,
        codes: torch.Tensor,
        exponents: torch.Tensor,
        *,
        planes: bool,
        joined: bool,
    ) -> int:
        """Write the codes and exponents of ``numbers[outputs, inputs]``, as in ``moe/formats/lossless/codes.py``, or
        as in ``planes.py`` beside it. ``joined``: the matrix is gates, then as many ups.

        ``exponents`` are zeros before. Returns how many weights have an exponent that the table lacks. If they are more
        than ``room``, what was written is of no use. On the calling thread.
        """
        found: int = self._lossless_encode(
            *(planes, joined, numbers.data_ptr(), *numbers.shape, room, codes.data_ptr(), exponents.data_ptr())
        )
        return found

    def lossless_numbers(
        self, codes: torch.Tensor, exponents: torch.Tensor, into: torch.Tensor, *, planes: bool, joined: bool
    ) -> None:
        """Write the numbers of a matrix that is kept as ``lossless_encode`` does to ``into[outputs, inputs]``."""
        outputs, inputs = into.shape
        self._lossless_numbers(
            *(planes, joined, codes.data_ptr(), exponents.data_ptr(), outputs, inputs, into.data_ptr()),
            self._threads(outputs * inputs),
        )

    def add_rows(
        self, out: torch.Tensor, tokens: NDArray[np.int64] | Lasting, rows: torch.Tensor, first: int = 0
    ) -> None:
        """``out[tokens[first + r]] += rows[r]`` of ``rows[R, H]``, as ``index_add_`` where no token comes twice.

        On the calling thread: torch wakes its threads even for one row, and waits for them.
        """
        self._add_rows(out.data_ptr(), _at(tokens) + 8 * first, rows.data_ptr(), *rows.shape)

    def clamped_experts(
        self,
        gate: ClampedGate,
        weights: Sequence[tuple[torch.Tensor, ...]],
        starts: Sequence[int] | NDArray[np.int64],
        rows: torch.Tensor,
        tokens: NDArray[np.int64] | Lasting,
        scales: NDArray[np.float32] | Lasting,
        out: torch.Tensor,
        *,
        add: bool,
        first: int = 0,
    ) -> None:
        """As ``experts``, of experts as gpt-oss has them.

        ``weights``: for each expert ``up[H, 2 I]``, whose outputs are a gate and an up in turns, ``up_bias[2 I]``,
        ``down[I, H]`` and ``down_bias[H]``.
        """
        self._clamped(self._clamped_experts, gate, weights, starts, rows, tokens, scales, out, add, first)

    def mxfp4_experts(
        self,
        gate: ClampedGate,
        weights: Sequence[tuple[torch.Tensor, ...]],
        starts: Sequence[int] | NDArray[np.int64],
        rows: torch.Tensor,
        tokens: NDArray[np.int64] | Lasting,
        scales: NDArray[np.float32] | Lasting,
        out: torch.Tensor,
        *,
        add: bool,
        first: int = 0,
    ) -> None:
        """As ``clamped_experts`` on the same weights expanded to bf16, to the bit.

        ``weights``: for each expert codes and scales of ``up``, ``up_bias[2 I]``, codes and scales of ``down``, and
        ``down_bias[H]``; laid out as in ``moe/formats/mxfp4.py``.
        """
        self._clamped(self._mxfp4_experts, gate, weights, starts, rows, tokens, scales, out, add, first)

    def _clamped(
        self,
        products: Any,
        gate: ClampedGate,
        weights: Sequence[tuple[torch.Tensor, ...]],
        starts: Sequence[int] | NDArray[np.int64],
        rows: torch.Tensor,
        tokens: NDArray[np.int64] | Lasting,
        scales: NDArray[np.float32] | Lasting,
        out: torch.Tensor,
        add: bool,
        first: int,
    ) -> None:
        """The biases are in the middle of an expert's tensors, and at their end."""
        some = weights[0]
        inner, hidden = some[len(some) // 2 - 1].shape[0] // 2, some[-1].shape[0]
        addresses = array("q", [tensor.data_ptr() for expert in weights for tensor in expert])
        begins = array("q", starts)
        products(
            *(addresses.buffer_info()[0], begins.buffer_info()[0], len(weights), hidden, inner, rows.data_ptr()),
            *(_at(tokens) + 8 * first, _at(scales) + 4 * first, out.data_ptr(), add),
            *(gate.alpha, _as_bf16(gate.limit), self._threads(3 * hidden * inner)),
        )

    @property
    def grouped_formats(self) -> Iterable[str]:
        """The names of what ``grouped_experts`` computes."""
        return self._grouped

    def grouped_experts(
        self,
        expert: GroupedExpert,
        weights: Sequence[tuple[torch.Tensor, ...]],
        starts: Sequence[int] | NDArray[np.int64],
        rows: torch.Tensor,
        tokens: NDArray[np.int64] | Lasting,
        scales: NDArray[np.float32] | Lasting,
        out: torch.Tensor,
        *,
        add: bool,
        first: int = 0,
    ) -> None:
        """As ``experts``, of codes of a few bits that share scales. A group's products are summed, then scaled.

        ``weights``: for each expert codes, scales, and minimums and an order where there are such, of up and of down;
        laid out as in ``moe/formats/panels.py``.
        """
        hidden = rows.shape[1]
        addresses = array("q", [tensor.data_ptr() for one in weights for tensor in one])
        formats, begins = self._grouped_formats(expert), array("q", starts)
        self._grouped_experts(
            *(formats.buffer_info()[0], addresses.buffer_info()[0], begins.buffer_info()[0], len(weights)),
            *(hidden, expert.inner, rows.data_ptr(), _at(tokens) + 8 * first, _at(scales) + 4 * first),
            *(out.data_ptr(), add, self._threads(3 * hidden * expert.inner)),
        )

    def _grouped_formats(self, expert: GroupedExpert) -> array[int]:
        """Of both matrices the format's number, how many inputs share a scale, and whether they have an order."""
        return array("q", [n for of in expert[:2] for n in (self._grouped[of.name], of.group, of.ordered)])

    def all_experts(
        self,
        addresses: Lasting,
        inner: int,
        picks: torch.Tensor,
        scales: torch.Tensor,
        rows: torch.Tensor,
        stream: torch.Tensor,
    ) -> int:
        """A layer whose picked experts are resident. ``addresses[E, 2]``: of their up and down tensors.

        For each of ``rows[T, H]`` the sum over its ``picks[T, k]`` with ``scales[T, k]`` (fp32) is added to
        ``stream[T, H]``, with the same result as ``experts``. Returns the number of distinct experts picked.
        """
        return self._all(self._all_experts, addresses, inner, picks, scales, rows, stream)

    def all_lossless_experts(
        self,
        expert: LosslessExpert,
        addresses: Lasting,
        inner: int,
        picks: torch.Tensor,
        scales: torch.Tensor,
        rows: torch.Tensor,
        stream: torch.Tensor,
    ) -> int:
        """As ``all_experts``, with the result of ``lossless_experts``. ``addresses[E, 4]``: of their four tensors."""
        products = functools.partial(self._all_lossless_experts, int(expert.planes))
        return self._all(products, addresses, inner, picks, scales, rows, stream)

    def _all(
        self,
        products: Any,
        addresses: Lasting,
        inner: int,
        picks: torch.Tensor,
        scales: torch.Tensor,
        rows: torch.Tensor,
        stream: torch.Tensor,
    ) -> int:
        (count, hidden), k = rows.shape, picks.shape[1]
        busy: int = products(
            *(addresses.at, len(addresses.array), picks.data_ptr(), scales.data_ptr(), count, k),
            *(hidden, inner, rows.data_ptr(), stream.data_ptr(), self._threads(3 * hidden * inner)),
        )
        return busy

    def all_grouped_experts(
        self,
        expert: GroupedExpert,
        addresses: Lasting,
        inner: int,
        picks: torch.Tensor,
        scales: torch.Tensor,
        rows: torch.Tensor,
        stream: torch.Tensor,
    ) -> int:
        """As ``all_experts``, of ``grouped_experts``. ``addresses[E, n]``: of their records' tensors."""
        (count, hidden), k = rows.shape, picks.shape[1]
        formats = self._grouped_formats(expert)
        busy: int = self._all_grouped_experts(
            *(formats.buffer_info()[0], addresses.at, len(addresses.array), picks.data_ptr(), scales.data_ptr()),
            *(count, k, hidden, inner, rows.data_ptr(), stream.data_ptr(), self._threads(3 * hidden * inner)),
        )
        return busy

    def route(
        self, weight: torch.Tensor, rows: torch.Tensor, top_k: int, *, normalise: bool, rounded: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Picks ``[T, k]`` and their scales (fp32) by a router that is ``weight[E, H]`` and a softmax.

        The largest first; of equal ones the lowest index. ``normalise``: the scales of a row add up to 1. ``rounded``:
        they are rounded to bf16.
        """
        (count, hidden), experts = rows.shape, weight.shape[0]
        picks, scales = torch.empty(count, top_k, dtype=torch.int64), torch.empty(count, top_k)
        self._route(
            *(weight.data_ptr(), rows.data_ptr(), count, hidden, experts, top_k),
            *(normalise, rounded, picks.data_ptr(), scales.data_ptr(), self._threads(experts * hidden)),
        )
        return picks, scales

    def route_confined(
        self,
        weight: torch.Tensor,
        rows: torch.Tensor,
        top_k: int,
        allowed: Lasting,
        rerouted: Lasting,
        *,
        normalise: bool,
        rounded: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As ``route`` with only the experts of ``allowed[T, E]``, or of ``allowed[1, E]`` for all rows.

        Writes to ``rerouted`` (at least T long) whether each row's picks differ from those without the mask. Returns
        how many do. -1: a row has fewer than ``top_k`` experts, and nothing was done.
        """
        (count, hidden), experts = rows.shape, weight.shape[0]
        picks, scales = torch.empty(count, top_k, dtype=torch.int64), torch.empty(count, top_k)
        found: int = self._route_confined(
            *(weight.data_ptr(), rows.data_ptr(), count, hidden, experts, top_k, normalise, rounded),
            *(allowed.at, experts if len(allowed.array) > 1 else 0, rerouted.at),
            *(picks.data_ptr(), scales.data_ptr(), self._threads(experts * hidden)),
        )
        return picks, scales, found

    def before_attention(
        self, of: AttentionWeights, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values ``[T, heads, D]`` from the residual stream ``hidden[T, H]``.

        Applies its norm, the projections, the norms of heads, and rotary positions by ``cosines[T, D]`` and
        ``sines[T, D]``.
        """
        count = len(hidden)
        widths = [one.outputs for one in (of.query, of.key, of.value)]
        shapes = [(count, width // of.dim, of.dim) for width in widths]
        query, key, value = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        self._before_attention(
            *(of, hidden.data_ptr(), count, cosines.data_ptr(), sines.data_ptr()),
            *(query.data_ptr(), key.data_ptr(), value.data_ptr()),
            self._threads(of.hidden * sum(widths)),
        )
        return query, key, value

    def after_attention(self, of: AttentionWeights, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Adds the output projection of ``mixed[T, width]`` to ``hidden[T, H]`` and returns the norm of that."""
        count, width = mixed.shape
        normed = torch.empty_like(hidden)
        self._after_attention(
            *(of, mixed.data_ptr(), width, hidden.data_ptr(), normed.data_ptr(), count),
            self._threads(width * of.hidden),
        )
        return normed

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """``weight * (rows / sqrt(mean(rows²) + epsilon))`` over the last axis. The bracket is rounded to bf16."""
        out = torch.empty_like(rows)
        width = rows.shape[-1]
        self._rms_norm(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), rows.numel() // width, width, epsilon)
        return out

    def rotate(self, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Rotary position embedding of ``rows[T, heads, D]`` in place, by ``cosines[T, D]`` and ``sines[T, D]``."""
        count, heads, dim = rows.shape
        self._rotary(rows.data_ptr(), cosines.data_ptr(), sines.data_ptr(), count, heads, dim)

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sequences: NDArray[np.int64],
        out: torch.Tensor,
        scale: float,
        *,
        sinks: torch.Tensor | None = None,
        write: bool = True,
    ) -> None:
        """Attention row by row, each over its sequence up to itself. All new keys and values are written to the
        sequences' memory first, so several rows may belong to one sequence. A row's result does not depend on others.

        ``queries[T, heads, D]``, ``keys[T, key heads, D]`` and ``values`` of a step must have a contiguous last axis.
        ``out[T, heads, value D]``: only rows named in ``sequences`` are written. ``sequences[n, 6]``: the row in the
        step, the addresses of the sequence's keys and values ``[key heads, stride, D]``, the stride, how many rows
        come before it, and the first key that it sees. ``sinks[heads]``: scores that have a share of the softmax and no
        value, as gpt-oss has them. ``write``: False if the sequences' memory has them already.
        """
        _, key_heads, key_dim = keys.shape
        strides = [
            array("q", (tensor.data_ptr() if written else 0, tensor.stride(0), tensor.stride(1)))
            for tensor, written in ((queries, True), (keys, write), (values, write))
        ]
        self._attention(
            *(of.buffer_info()[0] for of in strides),
            *(sequences.ctypes.data, len(sequences), out.data_ptr()),
            *(key_heads, queries.shape[1] // key_heads, key_dim, values.shape[2], scale),
            None if sinks is None else sinks.data_ptr(),
            self._threads(int(sequences[:, 4].sum()) * key_heads * key_dim * 2),
        )

    def _threads(self, weights: int) -> int:
        return torch.get_num_threads() if self.threaded and weights >= _WEIGHTS_WORTH_A_THREAD else 1


def _as_bf16(number: float) -> float:
    """As a bf16 tensor is clamped to it."""
    return float(torch.tensor(number, dtype=torch.bfloat16))


ANY_ROWS = 1 << 30
"""Without instructions for bf16 torch was slower at all measured numbers of rows, up to 256."""

_ROWS_UNMEASURED = 4
"""With them, until they are measured: with few rows a product is bound by memory."""

_WEIGHTS_WORTH_A_THREAD = 1 << 18
"""Weights above which a product takes longer than waking another thread: about 50 us of reading."""


@functools.cache
def native_rows() -> NativeRows:
    """The library of this installation. Raises NativeUnavailable, saying why."""
    library = native_library()
    try:
        return NativeRows(library)
    except AttributeError as lacking:  # the sources went on, and what was compiled of them did not
        raise NativeUnavailable(f"the library is of another version ({lacking}): install greenroom again") from lacking


def native_rows_or_none() -> NativeRows | None:
    """None: the compiled products are not available here."""
    try:
        return native_rows()
    except NativeUnavailable:
        return None


def _lend_threads(library: ctypes.CDLL) -> bool:
    """Have the library run on torch's OpenMP threads. False: it runs on the calling thread alone."""
    runtime = _openmp_runtime()
    if runtime is None:
        return False
    lend = library.greenroom_use_threads
    functions = (runtime.GOMP_parallel, runtime.omp_get_thread_num, runtime.omp_get_num_threads)
    lend.argtypes = [ctypes.c_void_p] * len(functions)
    lend.restype = None
    lend(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
    return True


def _openmp_runtime() -> Any:
    """The OpenMP runtime that torch has loaded, if it has GNU's interface (LLVM's and Intel's have it too)."""
    folder = Path(torch.__file__).parent / "lib"
    beside = folder.parent.parent / "torch.libs"
    names = [*folder.glob("libgomp*"), *beside.glob("libgomp*"), *folder.glob("libiomp5*"), *folder.glob("libomp*")]
    for path in names:
        try:
            runtime = ctypes.CDLL(str(path), mode=_ONLY_IF_LOADED)
            runtime.GOMP_parallel, runtime.omp_get_thread_num, runtime.omp_get_num_threads  # noqa: B018
        except (OSError, AttributeError):
            continue
        return runtime
    return None


_ONLY_IF_LOADED = ctypes.DEFAULT_MODE | os.RTLD_NOLOAD
