"""What was run, written beside its figures so that nobody has to guess."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from greenroom import __version__
from greenroom_load.arrivals import AtOnce, Gamma
from greenroom_load.plan import Plan
from greenroom_load.transport import Style, Transport

_SECRET = ("--api-key", "--header")


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line with the values of ``--api-key`` and ``--header`` blotted out."""
    shown: list[str] = []
    hide = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        shown.append("***" if hide else f"{name}=***" if equals and name in _SECRET else argument)
        hide = not hide and not equals and name in _SECRET
    return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """``command``: as typed, without secrets. ``label``: the user's own name for the run."""

    plan: Plan
    style: Style
    command: tuple[str, ...]
    backend: str
    url: str
    model: str
    label: str | None = None

    @classmethod
    def of(
        cls, plan: Plan, style: Style, transport: Transport, model: str, command: Sequence[str], label: str | None
    ) -> Setup:
        return cls(
            plan=plan,
            style=style,
            command=tuple(without_secrets(command)),
            backend=transport.kind,
            url=transport.address,
            model=model,
            label=label,
        )

    @property
    def closed_loop(self) -> bool:
        """Whether late sends are what was asked for: a bound on concurrency holds requests back."""
        return self.plan.bounds.max_concurrency is not None or isinstance(self.plan.arrivals, AtOnce)

    @property
    def rate(self) -> float | str:
        """As vLLM writes it: a number, or ``inf``."""
        rate = self.plan.arrivals.rate
        return "inf" if math.isinf(rate) else rate

    @property
    def burstiness(self) -> float:
        return self.plan.arrivals.burstiness if isinstance(self.plan.arrivals, Gamma) else 1.0

    def as_json(self) -> dict[str, object]:
        plan, bounds, style = self.plan, self.plan.bounds, self.style
        return {
            "command": ["greenroom-load", *self.command],
            "version": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpus": len(os.sched_getaffinity(0)),
            "url": self.url,
            "api": self.backend,
            "model": self.model,
            "label": self.label,
            "seed": plan.seed,
            "loop": "closed" if self.closed_loop else "open",
            "arrivals": str(plan.arrivals),
            "prompts": str(plan.prompts),
            "task_mix": str(plan.mix),
            "output_length": str(plan.output),
            "input_length": None if plan.input is None else str(plan.input),
            "ignore_eos": style.ignore_eos,
            "temperature": style.temperature,
            "extra_body": dict(style.extra),
            "slo": plan.targets.as_json(),
            "send_slo": style.send_slo,
            "send_task_type": style.send_task_type,
            "num_requests": bounds.num_requests,
            "duration_s": bounds.duration_s,
            "max_concurrency": bounds.max_concurrency,
            "max_outstanding": bounds.max_outstanding,
            "warmup_requests": bounds.warmup_requests,
            "request_timeout_s": bounds.request_timeout_s,
            "drain_timeout_s": bounds.drain_timeout_s,
        }
