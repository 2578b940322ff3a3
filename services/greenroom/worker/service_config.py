"""How a worker serves its pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.core.artifacts.forecast_kinds import EMOE_A, PREDICTORS, STATISTICS
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB

LONGEST_MS = 3_600_000.0
MOST_PLACES = 1_000_000


def predictor_for(policy: str) -> str:
    """The default predictor of an expert policy's forecasts."""
    return EMOE_A if policy == "emoe" else STATISTICS


def _milliseconds(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 < value <= LONGEST_MS:
            raise InvalidConfig(name, value, "a number of milliseconds above 0, at most an hour")


def _at_least(config: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < least:
            raise InvalidConfig(name, value, f"a whole number from {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Tokens to gateways. Times in milliseconds.

    A gateway's call is dropped where one message takes it longer than ``slow_gateway_ms``, or more than
    ``most_pending`` tokens wait for it. ``ask_every_ms``: how often it is asked to say when it has taken a message in.
    ``overdue_ms``: how long that may take; nothing more is sent after that until it has answered. Without this, gRPC
    would queue hundreds of messages for a busy gateway. ``unknown_gateway_ms``: after how long a gateway that is not
    announced counts as gone. ``idle_gateway_ms``: how long a call without streams is kept. Raises InvalidConfig, naming
    the field.
    """

    slow_gateway_ms: float = 5_000.0
    most_pending: int = 65_536
    ask_every_ms: float = 10.0
    overdue_ms: float = 5.0
    unknown_gateway_ms: float = 10_000.0
    idle_gateway_ms: float = 60_000.0

    def __post_init__(self) -> None:
        _milliseconds(self, "slow_gateway_ms", "ask_every_ms", "overdue_ms", "unknown_gateway_ms", "idle_gateway_ms")
        _at_least(self, 1, "most_pending")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Routing traces of finished sequences. ``rows``: how many rows of a sequence are kept, from its first on.
    ``waiting``: how many traces may wait to be written; further ones are dropped. ``tokens``: whether each row's token
    is told too, which is people's text. Raises InvalidConfig, naming the field."""

    enabled: bool = True
    tokens: bool = False
    rows: int = 1024
    waiting: int = 64
    timeout_ms: float = 10_000.0

    def __post_init__(self) -> None:
        _at_least(self, 1, "rows", "waiting")
        _milliseconds(self, "timeout_ms")

    @property
    def tells_tokens(self) -> bool:
        return self.enabled and self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastConfig:
    """Forecasts from the predictor. ``every``: a forecast for so many prompts, 0 for never. ``address``: host:port of
    the predictor; None: any that the members name. ``predictor``: one of PREDICTORS. The learnt ones go by the last
    prompt of a task type; until there is one, statistics answer. ``retry_ms``: the pause after a failure; it doubles
    with each further one, up to half a minute. Raises InvalidConfig, naming the field."""

    every: int = 40
    timeout_ms: float = 1_000.0
    retry_ms: float = 1_000.0
    address: str | None = None
    predictor: str = STATISTICS

    def __post_init__(self) -> None:
        _at_least(self, 0, "every")
        _milliseconds(self, "timeout_ms", "retry_ms")
        if self.predictor not in PREDICTORS:
            raise InvalidConfig("predictor", self.predictor, f"allowed: {', '.join(PREDICTORS)}")

    @property
    def by_previous(self) -> bool:
        """Whether the last prompts' routing is asked for."""
        return self.every > 0 and self.predictor != STATISTICS


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactConfig:
    """The artifacts that the expert policy predicts by, kept up to date. ``every_ms``: how often the predictor is asked
    for new versions, 0 for never. ``retry_ms``: the pause after a failure; it doubles with each further one, up to
    ``every_ms``. ``address``: host:port of the predictor; None: any that the members name. ``timeout_ms``: for a
    question, ``fetch_ms``: for a file, which has at most ``max_bytes``. Raises InvalidConfig, naming the field."""

    every_ms: float = 10_000.0
    retry_ms: float = 500.0
    timeout_ms: float = 5_000.0
    fetch_ms: float = 60_000.0
    max_bytes: int = 128 * MIB
    address: str | None = None

    def __post_init__(self) -> None:
        if self.every_ms:
            _milliseconds(self, "every_ms")
        _milliseconds(self, "retry_ms", "timeout_ms", "fetch_ms")
        _at_least(self, 1, "max_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """One worker's place in its pool. Times in milliseconds.

    ``instance``: its name, another one for every start. ``max_running``: requests that generate at once.
    ``max_queued``: requests that wait behind them here. ``max_input_bytes``: of the inputs of all requests here; more
    are not taken before others have ended; None: any. ``grace_ms``: how long a run, or a result that was not released,
    outlives its scheduler's call. ``ttl_ms``: after how long of silence members take it for gone. ``fault``: what to
    break on purpose in tests, see ``faults``.
    Raises InvalidConfig, naming the field.
    """

    instance: str
    pool: int = 0
    max_running: int = 32
    max_queued: int = 8
    max_input_bytes: int | None = None
    grace_ms: float = 120_000.0
    ttl_ms: int = 10_000
    streams: StreamConfig = field(default_factory=StreamConfig)
    traces: TraceConfig = field(default_factory=TraceConfig)
    forecasts: ForecastConfig = field(default_factory=ForecastConfig)
    artifacts: ArtifactConfig = field(default_factory=ArtifactConfig)
    fault: str | None = None

    def __post_init__(self) -> None:
        if not self.instance or len(self.instance) > 256:
            raise InvalidConfig("instance", self.instance, "a name of 1 to 256 characters")
        _at_least(self, 0, "pool", "max_queued")
        _at_least(self, 1, "max_running")
        for name in ("max_running", "max_queued"):
            if getattr(self, name) > MOST_PLACES:
                raise InvalidConfig(name, getattr(self, name), f"a whole number of at most {MOST_PLACES}")
        _milliseconds(self, "grace_ms", "ttl_ms")

    @property
    def max_runs(self) -> int:
        """Requests here at once, finished ones that nobody has released included."""
        return self.max_running + self.max_queued

    @property
    def records_routing(self) -> bool:
        """Whether the routing of finished sequences is used."""
        return self.traces.enabled or self.forecasts.by_previous
