"""greenroom as a child process: its policy as it is written on a command line, and its specification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.children.processes import ChildSpec
from benchmarks.harness.rows import GREENROOM
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.registry import create_policy
from greenroom.replay.sweeps.sweep import PolicySpec

CONCURRENCY = 8


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of ``look-ahead`` or ``look-ahead:layers=1,retention=lfu``; values are JSON, or words.

    Raises InvalidConfig for an option without a value, UnknownName and InvalidConfig as the registry does.
    """
    spec = PolicySpec.parse(text)
    create_policy(spec.name, catalogue=Catalogue.uniform("", layers=1, experts=1, top_k=1), options=spec.options)
    return spec.name, dict(spec.options)


def greenroom_child(
    model: Path,
    share: str,
    policy: str,
    *,
    limit_bytes: int | None = None,
    name: str = "",
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> ChildSpec:
    """A child at a share of the experts, with room for ``CONCURRENCY`` requests. ``settings``: more of the arm's."""
    policy_name, options = parse_policy(policy)
    settings |= {
        "model": str(model), "share": share, "policy": policy_name, "policy_options": options,
        "max_running": CONCURRENCY,
    }  # fmt: skip
    return ChildSpec.of(GREENROOM, settings, limit_bytes=limit_bytes, name=name, environment=environment)
