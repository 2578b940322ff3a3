"""An arm on the real engine before it is opened: a policy by its name, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.registry import create_policy


@dataclass(frozen=True, slots=True)
class Kind:
    """``name``: in tables. ``options``: of its policy. ``maps``: of the residual stream answer in place of routers.
    ``bare``: it has no files that were fitted beforehand, as where nobody gives any.
    """

    name: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    maps: bool = False
    bare: bool = False

    def create(self, catalogue: Catalogue, **more: Any) -> ExpertPolicy:
        """Its policy, with ``more`` options. Raises GreenroomError."""
        return create_policy(self.policy, catalogue=catalogue, options={**self.options, **more})
