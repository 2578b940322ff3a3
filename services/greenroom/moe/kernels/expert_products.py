"""Computes the experts of a layer: by torch's products, or for bf16 rows on a CPU by the compiled ones."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe as transformers_moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from greenroom.core.errors import InvalidConfig
from greenroom.experts.pack.layout import PLAIN, ExpertWeights
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.grouped_format import GroupedFormat
from greenroom.moe.formats.lossless.record import LosslessFormat
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.kernels.device_copies import to_device
from greenroom.moe.kernels.router_products import use_native_linear
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import (
    ANY_ROWS,
    ClampedGate,
    GroupedExpert,
    Lasting,
    LosslessExpert,
    NativeRows,
    RowLimits,
    native_rows,
)

Compute = Callable[[torch.Tensor, ExpertWeights], torch.Tensor]

Products = Callable[..., None]
"""Compiled products of experts, of the arguments of ``NativeRows.experts``."""

PRODUCTS = ("auto", "native", "torch")
"""Which products a model uses. "auto": the compiled ones if they are available and support its experts."""

AllProducts = Callable[..., int]
"""Compiled products of a layer whose picked experts are resident, of the arguments of ``NativeRows.all_experts``."""

SWIGLU, CLAMPED = "swiglu", "clamped"
"""The kinds of experts that compiled products know: ``down · (silu(gate · x) * (up · x))``, and gpt-oss's."""


class Grouped(NamedTuple):
    """The rows of a layer grouped by expert, within an expert in the order of transformers' eager implementation.

    ``tokens[T * k]``: row numbers. ``order[T * k]``: each pick's index in the flattened ``picks.T``.
    ``spans``: for each picked expert its turn in ascending order, and the begin and end of its rows.
    """

    tokens: NDArray[np.int64]
    order: NDArray[np.int64]
    spans: dict[int, tuple[int, int, int]]

    @classmethod
    def of(cls, picks: NDArray[np.int64], experts: int) -> Grouped:
        """From ``picks[T, k]``. A pick at or above the number of experts is none."""
        rows, k = picks.shape
        if rows == 1:  # the usual case, in which this is a good part of a layer's Python
            row = picks[0].tolist()
            places = sorted(range(k), key=row.__getitem__)
            if len(set(row)) == k:
                wanted = ((row[place], turn) for turn, place in enumerate(places))
                alone = {expert: (turn, turn, turn + 1) for expert, turn in wanted if expert < experts}
                return cls(np.zeros(k, dtype=np.int64), np.array(places), alone)
        slots = picks.T.reshape(-1)  # slot after slot
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        starts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist()]
        ends = [*starts[1:], len(order)]
        wanted = ordered[starts].tolist() if len(order) else []
        spans = {
            expert: (turn, start, end)
            for turn, (expert, start, end) in enumerate(zip(wanted, starts, ends, strict=False))
            if expert < experts
        }
        return cls(order % rows if rows > 1 else np.zeros_like(order), order, spans)


class PickedExpert(NamedTuple):
    """An expert of a layer with its weights. Its rows are those of ``Grouped`` from ``start`` to ``end``."""

    start: int
    end: int
    weights: ExpertWeights


class ExpertSum(Protocol):
    """A layer's output, to which its experts' contributions are added."""

    output: torch.Tensor

    def run(self, picked: Sequence[PickedExpert]) -> None:
        """Compute the contributions of these experts, and add them in this order."""
        ...

    def contribution(self, picked: PickedExpert) -> torch.Tensor:
        """``[end - start, H]``, to be added later, because it is not the expert's turn yet."""
        ...

    def add(self, start: int, end: int, contribution: torch.Tensor) -> None: ...


class TorchSum:
    """By torch, with the family's own activation. For any dtype, device and expert."""

    def __init__(self, rows: torch.Tensor, scales: torch.Tensor, grouped: Grouped, compute: Compute) -> None:
        self.output = torch.zeros_like(rows)
        self._rows = rows
        self._picked_scales = scales
        self._grouped = grouped
        self._compute = compute
        if rows.device.type != "cpu":
            # Queued now, because work that is queued after an expert was asked for waits for that expert's upload.
            both = to_device(torch.from_numpy(np.stack([grouped.tokens, grouped.order])), rows.device)
            self._tokens, order = both[0], both[1]
            self._scales = self._in_order(order)

    @cached_property
    def _tokens(self) -> torch.Tensor:
        return torch.from_numpy(self._grouped.tokens)

    @cached_property
    def _scales(self) -> torch.Tensor:
        return self._in_order(torch.from_numpy(self._grouped.order))

    def _in_order(self, order: torch.Tensor) -> torch.Tensor:
        return self._picked_scales.t().reshape(-1)[order].unsqueeze(-1)

    def run(self, picked: Sequence[PickedExpert]) -> None:
        for one in picked:
            self.add(one.start, one.end, self.contribution(one))

    def contribution(self, picked: PickedExpert) -> torch.Tensor:
        start, end, weights = picked
        product = self._compute(self._rows[self._tokens[start:end]], weights) * self._scales[start:end]
        return product.to(self.output.dtype)

    def add(self, start: int, end: int, contribution: torch.Tensor) -> None:
        self.output.index_add_(0, self._tokens[start:end], contribution)


class NativeSum(TorchSum):
    """By the compiled kernels, with one call for all experts that are available together. An expert with more rows than
    the kernels are fast for is computed by torch. ``products``: None is SwiGLU in bf16.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor,
        grouped: Grouped,
        compute: Compute,
        native: NativeRows,
        products: Products | None = None,
    ) -> None:
        super().__init__(rows.contiguous(), scales, grouped, compute)
        self._native = native
        self._experts = products or native.experts
        self._numbers = Lasting(grouped.tokens)
        self._factors = Lasting(scales.float().numpy().T.reshape(-1)[grouped.order])

    def run(self, picked: Sequence[PickedExpert]) -> None:
        few: list[PickedExpert] = []
        for one in picked:
            if one.end - one.start <= self._native.most_rows:
                few.append(one)
                continue
            self._call(few, self.output, add=True)
            few = []
            super().run([one])
        self._call(few, self.output, add=True)

    def contribution(self, picked: PickedExpert) -> torch.Tensor:
        rows = picked.end - picked.start
        if rows > self._native.most_rows:
            return super().contribution(picked)
        out = torch.empty(rows, self.output.shape[1], dtype=self.output.dtype)
        self._call([picked], out, add=False)
        return out

    def add(self, start: int, end: int, contribution: torch.Tensor) -> None:
        if end - start > self._native.most_rows:
            super().add(start, end, contribution)
        else:
            self._native.add_rows(self.output, self._numbers, contribution, start)

    def _call(self, picked: Sequence[PickedExpert], out: torch.Tensor, *, add: bool) -> None:
        """The rows of ``picked`` must be consecutive."""
        if not picked:
            return
        first = picked[0].start
        self._experts(
            [one.weights for one in picked],
            [0, *(one.end - first for one in picked)],
            self._rows,
            self._numbers,
            self._factors,
            out,
            add=add,
            first=first,
        )


def _plain_swiglu(native: NativeRows, experts: Any) -> Products:
    return native.experts


def _lossless_swiglu(of: LosslessFormat, native: NativeRows, experts: Any) -> Products:
    return partial(native.lossless_experts, LosslessExpert(of.planes, int(experts.intermediate_dim)))


def _plain_clamped(native: NativeRows, experts: Any) -> Products:
    return partial(native.clamped_experts, _gate_of(experts))


def _mxfp4_clamped(native: NativeRows, experts: Any) -> Products:
    return partial(native.mxfp4_experts, _gate_of(experts))


def _gate_of(experts: Any) -> ClampedGate:
    gate = clamped_gate_of(experts)
    assert gate is not None, "its kind says so"
    return gate


def _grouped_swiglu(of: GroupedFormat, native: NativeRows, experts: Any) -> Products:
    return partial(native.grouped_experts, GroupedExpert(*of.products, int(experts.intermediate_dim)))


_COMPILED: Final[dict[tuple[str, str], Callable[[NativeRows, Any], Products]]] = {
    (SWIGLU, PLAIN): _plain_swiglu,
    (CLAMPED, PLAIN): _plain_clamped,
    (CLAMPED, MXFP4.name): _mxfp4_clamped,
}
"""The compiled products by kind of experts and format of their records, of an experts module of transformers. Those of
a ``GroupedFormat`` and of a ``LosslessFormat`` are made of what it says."""


def kind_of(experts: Any) -> str | None:
    """Which kind of experts a module of transformers has; None: none that compiled products know."""
    if clamped_gate_of(experts) is not None:
        return CLAMPED
    return SWIGLU if computes_gated_silu(experts) else None


def are_compiled(experts: Any, expert_format: ExpertFormat) -> bool:
    """Whether there are compiled products of this experts module of transformers, of records of this format."""
    if isinstance(expert_format, GroupedFormat | LosslessFormat):
        return kind_of(experts) == SWIGLU
    return (kind_of(experts), expert_format.name) in _COMPILED


def products_of(native: NativeRows, experts: Any, expert_format: ExpertFormat) -> Products | None:
    """The compiled products of this experts module of transformers, of records of this format. None: there are none."""
    if not are_compiled(experts, expert_format):
        return None
    if isinstance(expert_format, GroupedFormat):
        return _grouped_swiglu(expert_format, native, experts)
    if isinstance(expert_format, LosslessFormat):
        return _lossless_swiglu(expert_format, native, experts)
    return _COMPILED[kind_of(experts) or "", expert_format.name](native, experts)


def all_products_of(native: NativeRows, products: Products | None) -> AllProducts | None:
    """Those that belong to a layer's ``products``, None being the default of ``NativeSum``. None: there are none."""
    if products is None or products == native.experts:
        return native.all_experts
    if isinstance(products, partial):
        if products.func == native.grouped_experts:
            return partial(native.all_grouped_experts, *products.args)
        if products.func == native.lossless_experts:
            return partial(native.all_lossless_experts, *products.args)
    return None


def native_for(
    experts: Any, dtype: torch.dtype, products: str, expert_format: ExpertFormat = PLAIN_FORMAT
) -> NativeRows | None:
    """The compiled products, if they support this experts module of transformers and records of this format. None:
    torch's are used.

    Raises InvalidConfig for a name that is not in PRODUCTS, and NativeUnavailable if "native" was asked for and is not
    available.
    """
    if products not in PRODUCTS:
        raise InvalidConfig("products", products, f"allowed: {', '.join(PRODUCTS)}")
    if products == "torch" or not (dtype is torch.bfloat16 and are_compiled(experts, expert_format)):
        return None
    try:
        return native_rows()
    except NativeUnavailable:
        if products == "native":
            raise
        return None


def describe_products(native: NativeRows | None, dtype: torch.dtype) -> str:
    """For a person: which products a model uses, and why not the compiled ones."""
    if native is not None:
        return f"compiled ({native.instruction_set}{_beyond(native.limits)})"
    if dtype is not torch.bfloat16:
        return "torch's (the compiled ones are for bfloat16)"
    try:
        native_rows()
    except NativeUnavailable as reason:
        return f"torch's ({reason})"
    return "torch's"


def _beyond(limits: RowLimits) -> str:
    if min(limits) >= ANY_ROWS:
        return ""
    kinds = {"a product": limits.product, "a decode step": limits.decode, "a prompt's step": limits.prompt}
    words = [f"{what}: {'any' if rows >= ANY_ROWS else rows}" for what, rows in kinds.items()]
    return f"; rows of {', '.join(words)}; more by torch"


def computes_gated_silu(experts: Any) -> bool:
    """Whether an experts module is exactly ``down · (silu(gate · x) * (up · x))``, with gate and up in one tensor."""
    return (
        getattr(experts, "has_gate", False)
        and not experts.has_bias
        and not experts.is_transposed
        and experts.is_concatenated
        and not experts.has_post_expert_norm
        and type(experts)._apply_gate is transformers_moe._default_apply_gate
        and isinstance(experts.act_fn, nn.SiLU | SiLUActivation)
        and experts.hidden_dim % 2 == 0
        and experts.intermediate_dim % 2 == 0
    )


def clamped_gate_of(experts: Any) -> ClampedGate | None:
    """The gate of an experts module that is exactly gpt-oss's; None for any other.

    Its projections are biased and stored ``[inputs, outputs]``, and the first one's outputs are gate and up in turns.
    """
    if not (
        getattr(experts, "has_gate", False)
        and experts.has_bias
        and experts.is_transposed
        and not experts.is_concatenated
        and not experts.has_post_expert_norm
        and type(experts)._apply_gate is GptOssExperts._apply_gate
        and experts.hidden_size % 2 == 0
        and experts.intermediate_size % 2 == 0
    ):
        return None
    return ClampedGate(float(experts.alpha), float(experts.limit))


def use_native(model: nn.Module, native: NativeRows, routers: Sequence[nn.Module]) -> None:
    """From now on the compiled products compute the model's norms, bf16 linear maps and ``routers``."""
    spared = {part for router in routers for part in router.modules()}
    for router in routers:
        use_native_linear(router, native)
    for module in model.modules():
        if module in spared:
            continue
        if type(module) is nn.Linear:
            weight = module.weight
            if weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and module.in_features % 2 == 0:
                module.forward = types.MethodType(_native_linear(native), module)  # type: ignore[method-assign]
        elif type(module).__name__.endswith("RMSNorm") and is_plain_rms_norm(module, native):
            module.forward = types.MethodType(_native_norm(native), module)


def _native_linear(native: NativeRows) -> Callable[[nn.Linear, torch.Tensor], torch.Tensor]:
    def forward(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, module.in_features)
        if len(rows) > native.most_rows:
            return nn.functional.linear(inputs, module.weight, module.bias)
        out = native.linear(rows.contiguous(), module.weight, module.bias)
        return out.view(*inputs.shape[:-1], module.out_features)

    return forward


def _native_norm(native: NativeRows) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def forward(module: Any, inputs: torch.Tensor) -> torch.Tensor:
        return native.rms_norm(inputs.contiguous(), module.weight, module.variance_epsilon)

    return forward


def is_plain_rms_norm(module: Any, native: NativeRows) -> bool:
    """Whether a norm is exactly the weight times the normalised rows, which is tried.

    Families differ in what they add to the weight and where they round, but their classes have the same name.
    """
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if weight is None or epsilon is None or weight.dtype is not torch.bfloat16 or weight.device.type != "cpu":
        return False
    with torch.inference_mode():
        rows = torch.linspace(-3, 4, 3 * len(weight)).sin().bfloat16().view(3, -1)
        theirs, ours = module(rows).float(), native.rms_norm(rows, weight, epsilon).float()
    close = (theirs - ours).abs() <= theirs.abs() * 2.0**-6
    return bool(close.all()) and bool((theirs == ours).float().mean() > 0.9)
