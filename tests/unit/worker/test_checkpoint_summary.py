"""What is said of a checkpoint whose experts differ in size."""

from __future__ import annotations

import json

from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.worker.model.checkpoint_summary import Summary


def test_the_bytes_of_an_expert_are_the_mean_and_all_sizes_are_told() -> None:
    catalogue = Catalogue("m", experts_per_layer=[6, 2], top_k=[2, 2], expert_bytes=[300, 100])
    summary = Summary(
        name="m", model_type="mixtral", dtype="bfloat16", moe_layers=2, experts_per_layer=6, top_k=2,
        slot_sizes=SlotSizes(catalogue), dense_bytes=1000, kv_bytes_per_token=None, max_model_len=8, refused=None,
        checked=True,
    )  # fmt: skip
    told = json.loads(json.dumps(summary.record()))
    assert (told["experts"], told["expert_bytes"], told["expert_sizes"]) == (8, 250, [100, 300])
    assert summary.least_bytes == 1000 + 300 + 100
