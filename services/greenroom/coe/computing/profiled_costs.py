"""What a profile says of a collaboration's experts, as dispatchers and placement take it. Without torch."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.coe.computing.batch_size import batch_size
from greenroom.core.coe_profile import CoeProfile
from greenroom.policies.placement.placement_policy import Costs


def executor_costs(profile: CoeProfile, names: Sequence[str], kind: str, executors: int) -> Costs:
    """K, B and loading of each expert on one of ``executors`` of this kind. ``names[N]``: as in the graph.

    Raises InvalidConfig for a kind that was not measured.
    """
    own = profile.of_kind(kind)
    keys = [profile.experts[name] for name in names]
    times = [own.times(key, executors) for key in keys]
    return Costs(
        token_ms=max(one.request_ms for one in times),
        batch_ms=max(one.batch_ms for one in times),
        load_ms_by_expert={expert: own.architectures[key].load_ms for expert, key in enumerate(keys)},
        request_ms_by_expert={expert: one.request_ms for expert, one in enumerate(times)},
        batch_ms_by_expert={expert: one.batch_ms for expert, one in enumerate(times)},
    )


def largest_batches(
    profile: CoeProfile, names: Sequence[str], kind: str, executors: int, intermediate_bytes: int
) -> dict[int, int]:
    """By expert, the largest batch of one executor that has so many bytes for intermediates (request splitting).

    0: not even one request fits. Raises InvalidConfig for a kind that was not measured.
    """
    own = profile.of_kind(kind)
    most: dict[str, int] = {}
    for key in {profile.experts[name] for name in names}:
        profiled = own.times(key, executors).most
        most[key] = batch_size(profiled, intermediate_bytes, own.architectures[key].bytes_by_batch, profiled)
    return {expert: most[profile.experts[name]] for expert, name in enumerate(names)}
