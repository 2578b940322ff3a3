"""ExpertPolicy decides which experts of a pool are where.

How the engine drives one
=========================
One object serves one pool and one device arena with the host tier under it. ``create_policy("lru",
catalogue=...)`` makes it; ``on_budget_changed`` follows for every tier. All calls come from one thread at a time
(movers post what they finished; the thread that owns the model delivers it), never block and never fail for
anything that the other side did.

**Events are pushed** through ``on_...`` methods, all of which do nothing by default. A policy's ``hooks`` names
those that it overrides: the engine looks once, when it is made, and calls no others, so that in the resident case
a layer costs one event object and one call. In order:

    sequence   on_sequence_queued, on_sequence_started, on_sequence_ended (then ``report``)
    step       on_step_started(step)
    layer      on_layer_entered(step, layer)          before its attention
               row_mask(step, layer, resident)        pull, before its router; only if overridden
               on_layer_routed(routing)               before its experts run
               compute_order(routing, resident)       pull; only if overridden
               victims(request)                       pull, when the misses do not fit
               take_requests()                        pull, when the misses are on their way; only if it ``asks``
               on_prediction(prediction)              the answers of providers that answer at once
               on_evicted, on_transfer_done/failed    as it happens
               on_experts_done(step, layer, experts)  batched: whenever it suits the engine, at the latest with
               on_layer_done(step, layer)             the layer's end
    any time   on_prediction, on_artifact_swapped, on_budget_changed

**Actions are pulled.** What a policy *wants* stands in two attributes that the engine looks at around each layer (when
it is entered, routed and done) and after a prediction, comparing the object with the last one seen:

    policy.prefetch   priorities over all keys, one array; replaces the one before it, queued or not
    policy.target     a set that should be resident in a tier, filled when no prefetch waits

What the engine must *ask* is a method: ``victims`` (the hot one: once for all misses of a layer, not once an
expert), ``compute_order``, ``row_mask``; ``take_requests`` hands over requests for predictions, which the engine
passes to the providers and answers with ``on_prediction`` later, or never.

An on-demand fetch of layer L is thus: ``on_layer_routed(routing)``; missing = routing.experts not resident;
``victims(VictimRequest(tier, bytes of what does not fit, evictable, resident, incoming=missing))``; evict those,
``on_evicted``; fetch; ``on_transfer_done`` for each. All of ``routing.experts`` are unevictable from
``on_layer_routed`` until they have run. Where a layer's experts outnumber the slots, the engine computes in waves:
those that have run become evictable, and it asks again.
"""

# Events that do nothing by default are the point of the base class.
# ruff: noqa: B027
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from greenroom.policies.base.array_types import Keys, Mask, Scores
from greenroom.policies.base.catalogue import Catalogue
from greenroom.policies.base.events import (
    Artifact,
    LayerRouting,
    Prediction,
    PredictionRequest,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
    Transfer,
    VictimRequest,
)


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """Whom to bring nearer, most urgent first. Immutable once published: a change is a new object.

    ``priority[N]``: higher is sooner, 0 or less is not wanted. Among equals the lower key goes first.
    ``may_evict[N]``: those that may displace a resident expert; the others only fill free slots (None: all may).
    An on-demand fetch overtakes all of it. An expert on disk is brought to the host and then to the device. With
    ``tier`` HOST it goes no further, behind everything that goes to the device; one on the device is near enough.
    """

    generation: int
    priority: Scores
    may_evict: Mask | None = None
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The set that ``tier`` should hold. Immutable once published: a change is a new object.

    Members that are missing are fetched in key order, hence layer after layer, while no prefetch waits; only
    experts outside the set make room for them. With ``drop_others`` those outside are evicted even where the
    room is not needed. More members than fit: the first in key order that do.

    Of a target for the HOST those on the device count as held: they are not read, and their copies on the host make
    room for members that are on neither.
    """

    generation: int
    wanted: Mask
    tier: Tier = Tier.DEVICE
    drop_others: bool = False


_DECLARATIONS = ("hooks", "asks", "artifacts")


class ExpertPolicy(ABC):
    """Base of all expert policies: events that do nothing, wants that are empty, and ``victims`` to be written.

    Invariants for every policy (the contract suite holds them): what it answers depends on the events and
    arguments alone, so equal histories give equal answers; it never writes to what it is given; it has no clock,
    no thread and no I/O.
    """

    hooks: frozenset[str] = frozenset()
    """Names of the methods that this class overrides; the engine calls no other event. One that overrides what it has
    no use for as it is set up may take it out when it is made."""

    asks: ClassVar[frozenset[str]] = frozenset()
    """Kinds of predictions that this class may request; where there are none ``take_requests`` is never called."""

    artifacts: ClassVar[frozenset[str]] = frozenset()
    """Kinds of artifacts that this class predicts by: whoever runs it hands over their newest versions."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.hooks = frozenset(
            name
            for name in vars(ExpertPolicy)
            if name not in _DECLARATIONS and not name.startswith("_")
            if getattr(cls, name) is not getattr(ExpertPolicy, name)
        )

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.prefetch: Prefetch | None = None
        self.target: Target | None = None
        self._requests: dict[str, PredictionRequest] = {}

    # -- what is asked of it ---------------------------------------------------------------------------------

    @abstractmethod
    def victims(self, request: VictimRequest) -> Keys:
        """Who leaves ``request.tier``: distinct keys out of ``request.evictable``, the first to go first.

        Together they free at least ``bytes_needed``, and no one is among them without whom that still holds.
        Empty is a refusal. A policy may refuse a PREFETCH or TARGET (what comes is worth less than what would
        go), and the engine drops that fetch until priorities change. It refuses ON_DEMAND and BUDGET only where
        all evictable experts together do not free enough. Changes nothing: the eviction counts when
        ``on_evicted`` says so.
        """

    def compute_order(self, routing: LayerRouting, resident: Mask) -> Keys | None:
        """The order in which the layer's experts are fetched and computed: a permutation of ``routing.experts``.

        None: resident ones first, the others as they land. The result of the layer does not depend on it.
        """
        return None

    def row_mask(self, step: Step, layer: int, resident: Mask) -> Mask | None:
        """Which experts each row may be routed to: ``[T, experts of the layer]``, at least top-k true in a row.

        Applied to the router's logits before the family's own top-k and normalisation. None: all. Anything else
        makes the output approximate, so the engine only asks where approximation was opted into.
        """
        return None

    def fill_order(self) -> Keys | None:
        """In which order the tiers are filled at the start: a permutation of all keys, of which the device gets as many
        as it holds, behind what is wanted or remembered there, and the host those after them.

        None: the device alone, with expert 0 of every layer, expert 1 of every layer, and so on.
        """
        return None

    def take_requests(self) -> tuple[PredictionRequest, ...]:
        """Requests for predictions since the last call, at most one of a kind: the newest. Empties them."""
        if not self._requests:
            return ()
        requests = tuple(self._requests.values())
        self._requests.clear()
        return requests

    def report(self, sequence: int) -> Mapping[str, float]:
        """What the policy has to say of a sequence that has just ended (its prefetch recall, say).

        Goes into the sequence's routing trace. Asked right after ``on_sequence_ended``, once.
        """
        return {}

    def loads_by_task(self) -> Mapping[str, int]:
        """By task type: how many experts one more request of it would bring to the device. A type that is not named:
        unknown.

        Unlike everything else this may be asked from another thread than the pool's.
        """
        return {}

    def prepare(self, artifact: Artifact) -> Artifact:
        """What takes long of swapping to ``artifact``, done beforehand; ``on_artifact_swapped`` is then told of what
        this returns. Changes nothing. Raises InvalidConfig for one that it can not use.

        May be asked from another thread than the pool's, and need not be asked.
        """
        return artifact

    # -- what it is told -------------------------------------------------------------------------------------

    def on_sequence_queued(self, sequence: SequenceInfo) -> None:
        """A request has arrived and waits."""

    def on_sequence_started(self, sequence: SequenceInfo) -> None:
        """It joins with the next step."""

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        """It has left, also where it never started."""

    def on_step_started(self, step: Step) -> None:
        """A forward begins."""

    def on_layer_entered(self, step: Step, layer: int) -> None:
        """The layer's attention is about to run."""

    def on_layer_routed(self, routing: LayerRouting) -> None:
        """The layer's experts are known and about to run."""

    def on_experts_done(self, step: Step, layer: int, experts: Keys) -> None:
        """These of the layer's experts have run; they may leave."""

    def on_layer_done(self, step: Step, layer: int) -> None:
        """All of the layer's experts have run."""

    def on_transfer_done(self, transfer: Transfer) -> None:
        """The expert has arrived in ``transfer.target``."""

    def on_transfer_failed(self, transfer: Transfer) -> None:
        """The expert did not arrive; it is where it was."""

    def on_evicted(self, tier: Tier, experts: Keys) -> None:
        """These have left the tier."""

    def on_prediction(self, prediction: Prediction) -> None:
        """A provider has answered; see Prediction for how it may surprise."""

    def on_artifact_swapped(self, artifact: Artifact) -> None:
        """Predictions and look-ups are from now on made with this version."""

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        """What the tier may hold. Told for every tier at the start; the engine changes none while it lives. Who changes
        one asks ``victims`` next, for Reason.BUDGET, where it shrank.
        """

    # -- for subclasses --------------------------------------------------------------------------------------

    def _ask(self, request: PredictionRequest) -> None:
        """Leave a request for a prediction; it replaces one of the same kind that was not taken yet."""
        self._requests.pop(request.kind, None)
        self._requests[request.kind] = request
