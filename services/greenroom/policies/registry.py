"""Policies by name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.base.events import ROUTER
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.batching.phases import PhasesBatching
from greenroom.policies.coserve.management import CoServe
from greenroom.policies.coserve.scheduling import CoServePlacement
from greenroom.policies.duoserve.literal import LiteralDuoServe
from greenroom.policies.duoserve.policy import DuoServe
from greenroom.policies.emoe.policy import Emoe
from greenroom.policies.emoe.popularity import Popularity
from greenroom.policies.emoe.scheduling import EmoeLiteralPlacement, EmoePlacement
from greenroom.policies.expertflow.literal import LiteralExpertFlow
from greenroom.policies.expertflow.policy import ExpertFlow
from greenroom.policies.expertflow.token_scheduler import TokenScheduler
from greenroom.policies.moe_infinity.policy import MoeInfinity
from greenroom.policies.placement.edf import EdfPlacement
from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.policies.placement.placement_policy import PlacementPolicy
from greenroom.policies.prefetching.look_ahead import LookAhead
from greenroom.policies.prefetching.next_layer import NextLayer, TopK, TracedTopK
from greenroom.policies.pull.policy import Pull
from greenroom.policies.replacement.belady import Belady
from greenroom.policies.replacement.decayed_frequency import Decayed
from greenroom.policies.replacement.fifo import Fifo
from greenroom.policies.replacement.lfu import Lfu, LfuReset
from greenroom.policies.replacement.lru import Lru
from greenroom.policies.replacement.lru_per_layer import LruPerLayer
from greenroom.policies.replacement.neighbour_aware import NeighbourAware
from greenroom.policies.replacement.next_use import NextUse
from greenroom.policies.replacement.static import Static
from greenroom.policies.reuse.policy import Reuse

EXPERT_POLICIES: dict[str, type[ExpertPolicy]] = {
    "belady": Belady,
    "coserve": CoServe,
    "decayed": Decayed,
    "duoserve": DuoServe,
    "emoe": Emoe,
    "expertflow": ExpertFlow,
    "fifo": Fifo,
    "lfu": Lfu,
    "lfu-reset": LfuReset,
    "look-ahead": LookAhead,
    "lru": Lru,
    "lru-per-layer": LruPerLayer,
    "moe-infinity": MoeInfinity,
    "neighbour-aware": NeighbourAware,
    "next-layer": NextLayer,
    "next-use": NextUse,
    "popularity": Popularity,
    "pull": Pull,
    "reuse": Reuse,
    "static": Static,
    "top-k": TopK,
    "traced-top-k": TracedTopK,
}
VARIANTS: dict[str, tuple[str, type[ExpertPolicy]]] = {
    "duoserve": ("literal", LiteralDuoServe),
    "expertflow": ("literal", LiteralExpertFlow),
}
"""By policy: an option that, where it is true, chooses another class in its place."""
SPELLINGS: dict[str, type[ExpertPolicy]] = EXPERT_POLICIES | {
    f"{name}:{switch}=true": variant for name, (switch, variant) in VARIANTS.items()
}
"""All classes, as users write them."""
GRAPH_POLICIES = frozenset({"coserve", "pull"})
"""Made for graphs of whole models: a model of MoE layers shows nothing of their own."""
BATCH_POLICIES: dict[str, type[BatchPolicy]] = {
    "fcfs": FcfsBatching,
    "phases": PhasesBatching,
    "token-scheduler": TokenScheduler,
}
PLACEMENT_POLICIES: dict[str, type[PlacementPolicy]] = {
    "edf": EdfPlacement,
    "emoe": EmoePlacement,
    "emoe-literal": EmoeLiteralPlacement,
    "fcfs": FcfsPlacement,
}
EXECUTOR_POLICIES: dict[str, type[PlacementPolicy]] = {"coserve": CoServePlacement, "fcfs": FcfsPlacement}
"""Those that place among the executors of one worker, in a graph of whole models."""
LATE_BINDING = "pull"
"""The scheduling that places nothing: an executor takes what has waited longest when it is free."""
EXECUTOR_SCHEDULINGS = (LATE_BINDING, *sorted(EXECUTOR_POLICIES))
"""How a worker's executors get their requests, in a graph of whole models; the first is the default."""
MODEL_POLICIES = ("pull", "coserve", "decayed", "fifo", "lfu", "lru")
"""Expert policies that decide about whole models by what they hear of them."""

P = TypeVar("P")


def create_policy(name: str, *, catalogue: Catalogue, options: Mapping[str, Any] | None = None) -> ExpertPolicy:
    """A new expert policy for one pool. ``options`` are the keyword-only arguments of the policy's class.

    Raises UnknownName, listing what is known, for a name or an option that is not; InvalidConfig for a bad value.
    """
    if name not in VARIANTS:
        return _create("policy", EXPERT_POLICIES, name, options, catalogue)
    own, (switch, _) = dict(options or {}), VARIANTS[name]
    switched = own.pop(switch, False)
    _check_kind(switch, switched, (bool,))
    if switched:
        return _create("policy", SPELLINGS, f"{name}:{switch}=true", own, catalogue)
    return _create("policy", EXPERT_POLICIES, name, own, catalogue, switches=(switch,))


def policy_class(name: str, options: Mapping[str, Any] | None = None) -> type[ExpertPolicy]:
    """The class that ``create_policy`` makes one of. Raises UnknownName."""
    if name not in EXPERT_POLICIES:
        raise UnknownName("policy", name, EXPERT_POLICIES)
    switch, variant = VARIANTS.get(name, ("", EXPERT_POLICIES[name]))
    return variant if (options or {}).get(switch) is True else EXPERT_POLICIES[name]


def spelling(name: str, options: Mapping[str, Any] | None = None) -> str:
    """How users write the policy, without options that leave its class as it is. Raises UnknownName."""
    made = policy_class(name, options)
    return next(written for written, each in SPELLINGS.items() if each is made)


Chosen = tuple[str, Mapping[str, Any]]
"""A policy's name and options."""


def check_taken(kind: str, name: str, policies: Collection[Chosen]) -> None:
    """Raises InvalidConfig where none of ``policies`` takes the artifact ``name`` of this ``kind``."""
    if any(kind in policy_class(*policy).artifacts for policy in policies):
        return
    taking = [policy for policy, made in SPELLINGS.items() if kind in made.artifacts]
    own, others = " and ".join(dict.fromkeys(spelling(*policy) for policy in policies)), " or ".join(taking)
    raise InvalidConfig(kind, name, f"{own} takes no {kind}: leave it out, or choose the policy {others}")


def check_given(kinds: Collection[str], name: str, options: Mapping[str, Any]) -> None:
    """Raises InvalidConfig where the policy needs an artifact of a kind that is not among those given."""
    for kind in sorted(policy_class(name, options).needs.difference(kinds)):
        made_by = ARTIFACT_FILES[kind].MADE_BY
        option, said = kind.replace("_", "-"), spelling(name, options)
        where = f"name one with --{option} or {kind}=, or put it into the model's folder as {kind}.safetensors"
        raise InvalidConfig(kind, None, f"a file that `{made_by}` makes, which {said} can not do without: {where}")


def runs_routers_ahead(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Whether the policy asks for what routers would pick. Raises UnknownName."""
    return ROUTER in policy_class(name, options).asks


def check_foresees(name: str, policy: str, options: Mapping[str, Any]) -> None:
    """Raises InvalidConfig where ``policy`` asks no router ahead, in whose place the file ``name`` would answer."""
    if not runs_routers_ahead(policy, options):
        asking = " or ".join(each for each, made in SPELLINGS.items() if ROUTER in made.asks)
        allowed = f"{spelling(policy, options)} runs no router ahead: leave it out, or choose the policy {asking}"
        raise InvalidConfig("residual", name, allowed)


def spelt(field: str, text: str) -> tuple[str, dict[str, Any]]:
    """A policy's name and options out of ``decayed`` or ``decayed:decay=0.999,…``, values as in JSON.

    Raises InvalidConfig, naming ``field``, for an option without a value.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, separator, value = part.partition("=")
        if not separator:
            raise InvalidConfig(field, text, "write options as NAME:OPTION=VALUE,OPTION=VALUE")
        try:
            options[option.strip()] = json.loads(value)
        except ValueError:
            options[option.strip()] = value.strip()
    return name.strip(), options


def create_batch_policy(name: str, *, options: Mapping[str, Any] | None = None) -> BatchPolicy:
    """A new batch policy; errors as create_policy."""
    return _create("batching", BATCH_POLICIES, name, options)


def create_placement_policy(name: str, *, options: Mapping[str, Any] | None = None) -> PlacementPolicy:
    """A new placement policy; errors as create_policy."""
    return _create("scheduling", PLACEMENT_POLICIES, name, options)


def create_executor_policy(name: str, *, options: Mapping[str, Any] | None = None) -> PlacementPolicy:
    """A new placement policy for a worker's executors; errors as create_policy."""
    return _create("scheduling", EXECUTOR_POLICIES, name, options)


def _create(
    field: str,
    known: Mapping[str, type[P]],
    name: str,
    options: Mapping[str, Any] | None,
    *args: object,
    switches: tuple[str, ...] = (),
) -> P:
    """``switches``: further options that may be given, and are not the class's."""
    try:
        policy = known[name]
    except KeyError:
        raise UnknownName(field, name, known) from None
    options = options or {}
    parameters = inspect.signature(policy).parameters.values()
    allowed = [*switches, *(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)]
    for option in options:
        if option not in allowed:
            if not allowed:
                raise InvalidConfig(f"{field} option", option, f"{name} takes no options")
            raise UnknownName(f"option of {field} {name}", option, allowed)
    if options:
        hints = get_type_hints(policy.__init__)
        for option, value in options.items():
            _check_kind(option, value, get_args(hints[option]) or (hints[option],))
    return policy(*args, **options)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "null"}


def _check_kind(option: str, value: object, kinds: tuple[type, ...]) -> None:
    """Raises InvalidConfig where a value is of none of the kinds. It may come from a command line's JSON."""
    for kind in kinds:
        if isinstance(value, bool) if kind is bool else isinstance(value, kind) and not isinstance(value, bool):
            return
        if kind is float and type(value) is int:
            return
    raise InvalidConfig(option, value, " or ".join(_KINDS.get(kind, f"a {kind.__name__}") for kind in kinds))
