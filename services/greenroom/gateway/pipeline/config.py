"""How a gateway uses its end of the log."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Settings of a gateway's end of the log. Raises InvalidConfig, naming the field.

    ``pool``: the pool whose model is served here. ``append_timeout_s``: how long an append may take before it is
    unknown. ``default_timeout_s``, ``max_timeout_s``: from acceptance to a request's end. ``keep_outcomes_bytes``:
    outcomes of keyed requests that are kept for a retry. ``max_keyed``: requests with an idempotency key in flight at
    once; more are refused, since these go on without their clients. ``journal_margin_s``: how much of the journal is
    read at the start, beyond ``max_timeout_s``: clocks differ, and a claim must be met. ``quiet_s``: while the log is
    silent, a client whose request has had no token for so long gets an error. ``ttl_ms``: workers take a gateway that
    has been silent on ``members`` for so long to be gone.
    """

    pool: int = 0
    append_timeout_s: float = 10.0
    default_timeout_s: float = 600.0
    max_timeout_s: float = 3600.0
    keep_outcomes_bytes: int = 256 * 1024 * 1024
    max_keyed: int = 1024
    journal_margin_s: float = 180.0
    quiet_s: float = 30.0
    ttl_ms: int = 6_000

    def __post_init__(self) -> None:
        if self.pool < 0:
            raise InvalidConfig("pool", self.pool, "it is a number from 0")
        for field in (
            "append_timeout_s", "default_timeout_s", "max_timeout_s", "keep_outcomes_bytes", "max_keyed",
            "journal_margin_s", "quiet_s", "ttl_ms",
        ):  # fmt: skip
            if not getattr(self, field) > 0:
                raise InvalidConfig(field, getattr(self, field), "it is a number above 0")
        if self.default_timeout_s > self.max_timeout_s:
            raise InvalidConfig("default_timeout_s", self.default_timeout_s, f"at most {self.max_timeout_s:g}")
