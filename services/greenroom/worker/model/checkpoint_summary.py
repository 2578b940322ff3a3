"""What a checkpoint is and how much memory it needs, from its configuration and the headers of its files alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from greenroom.core.errors import UnsupportedModel
from greenroom.experts.pack.layout import PLAIN
from greenroom.moe.architecture.families import ENCODER_DECODER_REASON, family_of
from greenroom.moe.architecture.moe_layers import blueprint, describe_layers
from greenroom.moe.formats.registry import shipped
from greenroom.moe.forward.ragged_probe import kv_layout_of
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.kept_format import keeps_dense, kept_format, stays_in_bfloat16
from greenroom.moe.loading.packing import resolve_dtype
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes

RUNTIME_BYTES = 700 * 1024**2
"""What Python, torch and transformers occupy before a model is loaded, roughly."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes in bytes. ``refused``: why the batch loop does not serve the model, None where it does. ``checked``: the
    headers of the weights were compared with the configuration; False where there are no weights here.
    ``slot_sizes``: how memory for experts is cut. ``expert_format``: how the experts lie in memory, "plain" being
    numbers of ``dtype``. ``dense_formats``: of linear layers outside them that stay as they are stored, as far as there
    are headers of weights to say so. ``dense_may_be_less``: ``dense_bytes`` counts numbers, and some of these layers
    may be codes. No configuration says for sure which ones: DeepSeek-V3's names none, and its head is numbers.
    ``stays_in_bfloat16``: the format in which experts would stay as they are stored with that dtype. Empty: they do, or
    would not.
    """

    name: str
    model_type: str
    dtype: str
    moe_layers: int
    experts_per_layer: int
    top_k: int
    slot_sizes: SlotSizes
    dense_bytes: int
    kv_bytes_per_token: int | None
    max_model_len: int
    refused: str | None
    checked: bool
    expert_format: str = PLAIN
    dense_formats: tuple[str, ...] = ()
    dense_may_be_less: bool = False
    stays_in_bfloat16: str = ""

    @property
    def experts(self) -> int:
        return self.slot_sizes.experts

    @property
    def mean_expert_bytes(self) -> int:
        """Of all experts of the model."""
        return self.slot_sizes.mean_bytes

    @property
    def least_bytes(self) -> int:
        return self.dense_bytes + self.slot_sizes.nbytes(self.slot_sizes.least)

    def fits(self, available: int) -> str:
        """How many experts ``available`` bytes hold beside the dense weights and one request at full length."""
        kv = (self.kv_bytes_per_token or 0) * self.max_model_len
        room = available - RUNTIME_BYTES - self.dense_bytes - kv
        slots = self.slot_sizes.within(room)
        if slots < self.slot_sizes.least:
            return "not even one layer's top-k experts"
        return f"about {slots} of {self.experts} experts ({slots / self.experts:.0%}) beside one request at full length"

    def record(self) -> dict[str, Any]:
        """All figures, flat, for JSON. ``expert_bytes``: of one expert, the mean of all. ``expert_sizes``: the sizes
        that records have, ascending.
        """
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "slot_sizes"}
        sizes = self.slot_sizes.bytes_of.tolist()
        return {**own, "experts": self.experts, "expert_bytes": self.mean_expert_bytes, "expert_sizes": sizes}


def summarise(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    experts_as: str = "auto",
    dense_as: str = "auto",
    *,
    products: str = "auto",
    device: str = "cpu",
) -> Summary:
    """Sizes come from the configuration. Tensors, where the checkpoint has any, are compared with it, and say which
    dense weights stay as they are stored: without them all are counted as numbers. ``experts_as``, ``dense_as``,
    ``products``, ``device``: as for ``kept_format`` and ``keeps_dense``.

    Raises UnsupportedModel, CorruptCheckpoint and InvalidConfig as loading does.
    """
    kept = resolve_dtype(checkpoint, dtype)
    expert_format = kept_format(checkpoint, dtype, experts_as, products=products, device=device)
    would_stay = stays_in_bfloat16(checkpoint, dtype, experts_as, products=products, device=device)
    dense_stays = keeps_dense(kept, dense_as, products=products, device=device)
    plan = None
    if checkpoint.tensors:
        required = dense_stays and dense_as == "stored"
        plan = ExpertPlan(checkpoint, kept, expert_format, dense_as_stored=dense_stays, dense_required=required)
    stored = {} if plan is None else plan.dense_stored
    model = blueprint(checkpoint.config, kept)
    layers = describe_layers(model, checkpoint.config, kept)
    text = checkpoint.config.get_text_config()
    refused: str | None = None if family_of(checkpoint.config).decoder_only else ENCODER_DECODER_REASON
    kv_bytes = None
    if refused is None:
        try:
            kv_bytes = kv_layout_of(model).bytes_per_token
        except UnsupportedModel as error:
            refused = str(error)
    found = shipped(checkpoint.config, checkpoint.tensors)
    own = found.format
    for layer in layers:
        for tensor in layer.tensors:
            own.stored_shapes(tensor)  # refused where the format has no such widths, also if all becomes numbers
    catalogue = Catalogue(
        "model",
        experts_per_layer=[layer.experts for layer in layers],
        top_k=[layer.top_k for layer in layers],
        expert_bytes=[expert_format.record(layer).nbytes for layer in layers],
    )
    of_experts = {
        layer.parameter(tensor.name, expert)
        for layer in layers
        for tensor in layer.tensors
        for expert in range(layer.experts)
    }
    elsewhere = of_experts | {f"{path}.weight" for path in stored}
    held = [*model.named_parameters(), *model.named_buffers()]  # tied ones once
    dense = sum(value.nbytes for name, value in held if name not in elsewhere)
    return Summary(
        name=checkpoint.name,
        model_type=checkpoint.config.model_type,
        dtype=str(kept).removeprefix("torch."),
        moe_layers=len(layers),
        experts_per_layer=max(layer.experts for layer in layers),
        top_k=max(layer.top_k for layer in layers),
        slot_sizes=SlotSizes(catalogue),
        dense_bytes=dense + sum(one.nbytes for one in stored.values()),
        kv_bytes_per_token=kv_bytes,
        max_model_len=getattr(text, "max_position_embeddings", 0) or 0,
        refused=refused,
        checked=bool(checkpoint.tensors),
        expert_format=expert_format.name,
        dense_formats=() if plan is None else plan.dense_formats,
        dense_may_be_less=plan is None and dense_stays and found.storage is not None,
        stays_in_bfloat16="" if would_stay is None else would_stay.name,
    )
