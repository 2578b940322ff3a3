"""From names to a dispatcher with its memories' policies: ``--scheduling`` and ``--policy`` of a collaboration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from greenroom.coe.dispatch.base import Dispatcher, ExpertMemory
from greenroom.coe.dispatch.early_binding import EarlyBinding
from greenroom.coe.dispatch.early_binding import Executor as ExecutorQueue
from greenroom.coe.dispatch.late_binding import LateBinding
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.placement.placement_policy import Costs
from greenroom.policies.registry import (
    EXECUTOR_SCHEDULINGS,
    GRAPH_POLICIES,
    LATE_BINDING,
    MODEL_POLICIES,
    create_executor_policy,
    create_policy,
)

LATE_OPTIONS: Final = {"age_ms": float, "ahead": int}
OWN_POLICY: Final = {"pull": "pull", "coserve": "coserve", "fcfs": "lru"}
"""By scheduling, the policy that goes with it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """``scheduling``: which executor computes what next. ``policy``: who leaves memory. ``shared``: one memory for all
    executors; None: as the scheduling has it, so one for ``pull`` and each its own otherwise. Both may have options.

    Raises InvalidConfig.
    """

    scheduling: str = LATE_BINDING
    policy: str = ""
    scheduling_options: Mapping[str, Any] = field(default_factory=dict)
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    shared: bool | None = None

    def __post_init__(self) -> None:
        if self.scheduling not in EXECUTOR_SCHEDULINGS:
            raise UnknownName("scheduling", self.scheduling, EXECUTOR_SCHEDULINGS)
        object.__setattr__(self, "policy", self.policy or OWN_POLICY[self.scheduling])
        if self.policy not in MODEL_POLICIES:
            raise UnknownName("policy", self.policy, MODEL_POLICIES)
        if self.scheduling == LATE_BINDING:
            if self.shared is False:
                raise InvalidConfig("shared", False, "with the scheduling pull all executors share one memory")
            for option, value in self.scheduling_options.items():
                _check_late(option, value)
        else:
            create_executor_policy(self.scheduling, options=self.scheduling_options)
        create_policy(self.policy, catalogue=Catalogue.of_models("none", [1]), options=self.policy_options)

    @property
    def one_memory(self) -> bool:
        return self.scheduling == LATE_BINDING if self.shared is None else self.shared

    @property
    def policy_spelt(self) -> str:
        """With its options, as users write it."""
        return _spelt(self.policy, self.policy_options)

    @property
    def scheduling_spelt(self) -> str:
        return _spelt(self.scheduling, self.scheduling_options)

    def make_policy(self, catalogue: Catalogue, dependencies: Dependencies) -> ExpertPolicy:
        """One for each memory."""
        options = dict(self.policy_options)
        if self.policy in GRAPH_POLICIES:
            options["dependencies"] = dependencies
        return create_policy(self.policy, catalogue=catalogue, options=options)

    def make_dispatcher(
        self, names: Sequence[str], memories: Mapping[str, ExpertMemory], costs: Costs, most: Mapping[int, int]
    ) -> Dispatcher:
        """``names``: of the executors, with their memories. ``most``: by expert, the largest batch."""
        if self.scheduling == LATE_BINDING:
            return LateBinding(memories[names[0]], names, most, **self.scheduling_options)
        placement = create_executor_policy(self.scheduling, options=self.scheduling_options)
        return EarlyBinding(placement, [ExecutorQueue(name, memories[name], costs, most) for name in names])


def _spelt(name: str, options: Mapping[str, Any]) -> str:
    written = ",".join(f"{option}={json.dumps(value)}" for option, value in options.items())
    return f"{name}:{written}" if written else name


def _check_late(option: str, value: object) -> None:
    if option not in LATE_OPTIONS:
        raise UnknownName("option of scheduling pull", option, LATE_OPTIONS)
    whole = LATE_OPTIONS[option] is int
    number = not isinstance(value, bool) and isinstance(value, int if whole else (int, float))
    if not number or not whole <= value < math.inf:  # type: ignore[operator]
        raise InvalidConfig(option, value, "a whole number from 1" if whole else "a number of milliseconds from 0")
