"""Which arms run in which stage. Later stages follow from what earlier ones found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.figures import BOUNDED, FROM_DISK, PEER, POLICIES, SHARES
from benchmarks.harness.children.child_rounds import Arm, Stage
from benchmarks.harness.children.greenroom_child import CONCURRENCY, greenroom_child
from benchmarks.harness.children.processes import ChildSpec
from benchmarks.harness.inputs.prepared_models import BUNDLED, LARGE, QUICK_SIZES, RANDOM, WIDENED, PreparedModel, Sizes
from benchmarks.harness.rows import GREENROOM, ORACLES, RESIDENT, THIRD, Row

EIGHTH = "12%"
ALL_ON_HOST, NO_HOST = "100%", "0%"
"""What the host tier holds, on a GPU."""
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
"""transformers' own experts' implementations; each runs with sdpa attention."""

IMPLEMENTATIONS_OF_MANY = ("eager", "grouped_mm")
"""Of several prompts at once: ``batched_mm`` copies a row's experts for every token of every prompt."""

ORACLE_AHEAD_LAYERS = 12
"""How far the oracle that prefetches looks: about as many experts as a slow disk brings in a few steps."""

RUNTIME_BYTES = 800 * 1024**2
"""What a process takes beside weights, for deciding how many may be open at once."""


@dataclass(frozen=True, kw_only=True)
class Scale(Sizes):
    """How much is run. ``minutes``: of all stages' rounds; opening arms comes on top.

    ``bounded_prompts``: for accelerate, which takes about a second a token. ``shares``: of the widened model's experts,
    beside a third; ``other_shares``: of the other models'. ``bounded``: the models that run beside accelerate.
    ``variants``: policies beside the registry's, each as on the command line. ``device``: what all arms compute on.
    """

    rounds: int = 3
    minutes: float = 17.0
    bounded_prompts: int = 3
    shares: tuple[str, ...] = ("12%", "20%", "50%", "75%")
    other_shares: tuple[str, ...] = ("12%",)
    bounded: tuple[str, ...] = (WIDENED, RANDOM, LARGE)
    variants: tuple[str, ...] = ("look-ahead:layers=1",)
    device: str = "cpu"

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


QUICK = Scale(
    rounds=1, minutes=1.0, bounded_prompts=1, shares=(), other_shares=(), bounded=(WIDENED,), variants=(),
    **asdict(QUICK_SIZES),
)  # fmt: skip


def policies_stages(
    model: PreparedModel, policies: Sequence[str], scale: Scale, seconds: float, memory: int
) -> list[Stage]:
    """Every policy at a third, beside the resident run and the oracles.

    As many engines are open at once as ``memory`` bytes hold; the others have a stage of their own.
    """
    each = RUNTIME_BYTES + (model.checkpoint_bytes if scale.on_gpu else model.checkpoint_bytes // 3)
    at_once = max(1, (memory - RUNTIME_BYTES - model.checkpoint_bytes) // each)
    named = [policy for policy in policies if policy not in ORACLES]
    if len(named) < len(policies):
        named += ORACLES
    if not named:
        return []
    count = -(-len(named) // at_once)
    parts = [named[len(named) * part // count : len(named) * (part + 1) // count] for part in range(count)]
    stages = []
    for number, part in enumerate(parts, start=1):
        name = POLICIES if number == 1 else f"{POLICIES} {number}"
        arms = [
            _ours(name, model, RESIDENT, "lru", scale),
            *(_policy_arm(name, model, policy, scale) for policy in part),
        ]
        stages.append(Stage(tuple(arms), scale.rounds, seconds * len(part) / len(named)))
    return stages


def shares_stage(model: PreparedModel, policy: str, scale: Scale, seconds: float) -> Stage:
    """Resident beside transformers, then smaller shares; one request at once and eight; instrumented turns."""
    arms = [_ours(SHARES, model, RESIDENT, "lru", scale, at_once) for at_once in (1, CONCURRENCY)]
    arms += [_peer(model, implementation, scale) for implementation in IMPLEMENTATIONS]
    arms += [_peer(model, implementation, scale, CONCURRENCY) for implementation in IMPLEMENTATIONS_OF_MANY]
    if model.name == BUNDLED and not scale.on_gpu:  # so small that a second thread may cost more than it does
        arms += [_peer(model, implementation, scale, threads=1) for implementation in IMPLEMENTATIONS]
    for share in (THIRD, *(scale.shares if model.name in (WIDENED, LARGE) else scale.other_shares)):
        arms.append(_ours(SHARES, model, share, policy, scale, link=True))
        if model.name != BUNDLED and share in (EIGHTH, THIRD):
            arms.append(_ours(SHARES, model, share, policy, scale, CONCURRENCY, link=True))
    if scale.on_gpu:
        arms.append(_ours(FROM_DISK, model, THIRD, policy, scale, link=True, host=NO_HOST))
    arms += [_ours(SHARES, model, share, "lru" if share == RESIDENT else policy, scale, instrumented=True)
             for share in (RESIDENT, THIRD)]  # fmt: skip
    return Stage(tuple(arms), scale.rounds, seconds)


@dataclass(frozen=True)
class Limits:
    """Memory of the bounded arms: greenroom's announced totals; None if no cgroup can be made.

    ``offload_folder`` holds what ``disk_offload`` reads; ``device_map`` writes to ``scratch`` and may keep
    ``device_map_bytes`` of weights in RAM. ``implementation``: transformers' experts implementation that was fastest
    resident.
    """

    third: int | None
    eighth: int | None
    device_map_bytes: int
    offload_folder: Path | None
    scratch: Path
    implementation: str = "grouped_mm"


def bounded_stage(model: PreparedModel, policy: str, limits: Limits, scale: Scale, seconds: float) -> Stage:
    """greenroom and accelerate, each in a memory cgroup of greenroom's announced total, with nothing cached before."""
    if scale.on_gpu:
        return _bounded_on_gpu(model, policy, limits, scale, seconds)
    stream, warm_up = model.stream.first(scale.bounded_prompts), model.stream.first(1)
    assert limits.offload_folder is not None
    cold = (*model.cold, limits.offload_folder, limits.scratch)
    arms = []
    shares = [(THIRD, limits.third)]
    shares += [(EIGHTH, limits.eighth)] if EIGHTH in scale.shares else []
    for share, limit in shares:
        child = greenroom_child(model.folder, share, policy, limit_bytes=limit, name=BOUNDED, device=scale.device)
        row = Row(BOUNDED, model.name, GREENROOM, share, policy)
        arms.append(Arm(row, child, stream, warm_up, cold=cold))
    # What device_map keeps in RAM, the page cache that it reads the rest through lacks: all of it, or half.
    whole, half = ({"memory_bytes": limits.device_map_bytes // n, "scratch": str(limits.scratch)} for n in (1, 2))
    peers: list[tuple[str, str, dict[str, Any]]] = [
        ("disk_offload", "", {"offload_folder": str(limits.offload_folder)}),
        ("device_map", "", whole),
        ("device_map", ", half cached", half),
    ]
    for system, how, settings in peers:
        child = ChildSpec.of(system, {"model": str(model.folder), **settings}, limit_bytes=limits.third)
        row = Row(BOUNDED, model.name, system, policy=limits.implementation + how)
        arms.append(Arm(row, child, stream, warm_up, {"implementation": limits.implementation}, cold=cold))
    return Stage(tuple(arms), scale.rounds, seconds)


def _bounded_on_gpu(model: PreparedModel, policy: str, limits: Limits, scale: Scale, seconds: float) -> Stage:
    """greenroom and accelerate, each with as much of the GPU's memory for weights; all others in RAM."""
    stream, warm_up = model.stream.first(scale.bounded_prompts), model.stream.first(1)
    settings = {"memory_bytes": limits.device_map_bytes, "scratch": str(limits.scratch), "device": scale.device}
    child = ChildSpec.of("device_map", {"model": str(model.folder), **settings})
    row = Row(BOUNDED, model.name, "device_map", policy=limits.implementation)
    peer = Arm(row, child, stream, warm_up, {"implementation": limits.implementation})
    ours = Arm(
        Row(BOUNDED, model.name, GREENROOM, THIRD, policy),
        greenroom_child(model.folder, THIRD, policy, device=scale.device, host=ALL_ON_HOST),
        stream,
        warm_up,
    )
    return Stage((ours, peer), scale.rounds, seconds)


def specs(stage: Stage | None) -> set[ChildSpec]:
    """The children that a stage needs."""
    return set() if stage is None else {arm.child for arm in stage.arms}


def _ours(
    stage: str,
    model: PreparedModel,
    share: str,
    policy: str,
    scale: Scale,
    concurrency: int = 1,
    *,
    link: bool = False,
    instrumented: bool = False,
    host: str | None = None,
) -> Arm:
    """``host``: on a GPU, the host tier's share; None: all experts where the device does not hold them."""
    row = Row(stage, model.name, GREENROOM, share, policy, concurrency, instrumented)
    arguments: dict[str, Any] = {"concurrency": concurrency}
    arguments |= {"link": True} if link else {}
    arguments |= {"inside": True} if instrumented else {}
    tiers: dict[str, Any] = {"device": scale.device}
    if scale.on_gpu:
        tiers["host"] = host or (NO_HOST if share == RESIDENT else ALL_ON_HOST)
    child = greenroom_child(model.folder, share, policy, **tiers)
    return Arm(row, child, model.stream, model.stream, arguments, {"record": True})


def _policy_arm(stage: str, model: PreparedModel, policy: str, scale: Scale) -> Arm:
    if policy not in ORACLES:
        return _ours(stage, model, THIRD, policy, scale, link=True)
    settings = {
        "model": str(model.folder),
        "share": THIRD,
        "policy": "belady",
        "policy_options": {"ahead": ORACLE_AHEAD_LAYERS if policy != "belady" else 0},
        "oracle": model.stream.as_arguments(),
        "oracle_turns": scale.rounds + 1,
        "device": scale.device,
    }
    if scale.on_gpu:
        settings["host"] = ALL_ON_HOST
    row = Row(stage, model.name, GREENROOM, THIRD, policy)
    child = ChildSpec.of(GREENROOM, settings)
    return Arm(row, child, model.stream, model.stream, {"concurrency": 1, "link": True}, {"record": True})


def _peer(
    model: PreparedModel, implementation: str, scale: Scale, concurrency: int = 1, threads: int | None = None
) -> Arm:
    policy = implementation if threads is None else f"{implementation}, {threads} thread"
    row = Row(SHARES, model.name, PEER, RESIDENT, policy, concurrency)
    child = ChildSpec.of(PEER, {"model": str(model.folder), "device": scale.device})
    arguments = {"concurrency": concurrency, "implementation": implementation, "threads": threads}
    return Arm(row, child, model.stream, model.stream, arguments)
