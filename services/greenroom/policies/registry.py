"""Policies by name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.batching.phases import PhasesBatching
from greenroom.policies.duoserve.policy import DuoServe
from greenroom.policies.emoe.policy import Emoe
from greenroom.policies.emoe.popularity import Popularity
from greenroom.policies.emoe.scheduling import EmoeLiteralPlacement, EmoePlacement
from greenroom.policies.moe_infinity.policy import MoeInfinity
from greenroom.policies.placement.edf import EdfPlacement
from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.policies.placement.placement_policy import PlacementPolicy
from greenroom.policies.prefetching.look_ahead import LookAhead
from greenroom.policies.prefetching.next_layer import NextLayer, TopK, TracedTopK
from greenroom.policies.replacement.belady import Belady
from greenroom.policies.replacement.decayed_frequency import Decayed
from greenroom.policies.replacement.fifo import Fifo
from greenroom.policies.replacement.lfu import Lfu, LfuReset
from greenroom.policies.replacement.lru import Lru
from greenroom.policies.replacement.neighbour_aware import NeighbourAware
from greenroom.policies.replacement.next_use import NextUse
from greenroom.policies.replacement.static import Static
from greenroom.policies.reuse.policy import Reuse

EXPERT_POLICIES: dict[str, type[ExpertPolicy]] = {
    "belady": Belady,
    "decayed": Decayed,
    "duoserve": DuoServe,
    "emoe": Emoe,
    "fifo": Fifo,
    "lfu": Lfu,
    "lfu-reset": LfuReset,
    "look-ahead": LookAhead,
    "lru": Lru,
    "moe-infinity": MoeInfinity,
    "neighbour-aware": NeighbourAware,
    "next-layer": NextLayer,
    "next-use": NextUse,
    "popularity": Popularity,
    "reuse": Reuse,
    "static": Static,
    "top-k": TopK,
    "traced-top-k": TracedTopK,
}
BATCH_POLICIES: dict[str, type[BatchPolicy]] = {"fcfs": FcfsBatching, "phases": PhasesBatching}
PLACEMENT_POLICIES: dict[str, type[PlacementPolicy]] = {
    "edf": EdfPlacement,
    "emoe": EmoePlacement,
    "emoe-literal": EmoeLiteralPlacement,
    "fcfs": FcfsPlacement,
}

P = TypeVar("P")


def create_policy(name: str, *, catalogue: Catalogue, options: Mapping[str, Any] | None = None) -> ExpertPolicy:
    """A new expert policy for one pool. ``options`` are the keyword-only arguments of the policy's class.

    Raises UnknownName, listing what is known, for a name or an option that is not; InvalidConfig for a bad value.
    """
    return _create("policy", EXPERT_POLICIES, name, options, catalogue)


def check_taken(kind: str, name: str, policies: Collection[str]) -> None:
    """Raises InvalidConfig where none of ``policies`` takes the artifact ``name`` of this ``kind``."""
    taking = [policy for policy, made in EXPERT_POLICIES.items() if kind in made.artifacts]
    if not set(taking).intersection(policies):
        own, others = " and ".join(policies), " or ".join(taking)
        raise InvalidConfig(kind, name, f"{own} takes no {kind}: leave it out, or choose the policy {others}")


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


def _create(field: str, known: Mapping[str, type[P]], name: str, options: Mapping[str, Any] | None, *args: object) -> P:
    try:
        policy = known[name]
    except KeyError:
        raise UnknownName(field, name, known) from None
    options = options or {}
    parameters = inspect.signature(policy).parameters.values()
    allowed = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
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
