"""ExpertPolicy decides which experts of a pool are where.

How the engine drives one
=========================
One object serves one pool: a device arena and the host tier under it. ``create_policy("lru", catalogue=...)`` makes
it; ``on_budget_changed`` follows for every tier. All calls come from one thread at a time. They never block, and never
fail for anything that the other side did.

**Events are pushed** through ``on_...`` methods, which do nothing by default. A policy's ``hooks`` name those that it
overrides. The engine looks once, when it is made, and calls no others. In order:

    sequence   on_sequence_queued, on_sequence_started, on_sequence_ended (then ``report``);
               on_sequence_preempted, after which it starts again
    step       on_step_planned(step)                  the forward after the one that is about to start, if there is one
               on_step_started(step)
    layer      on_layer_entered(step, layer)          before its attention
               row_mask(step, layer, resident)        pull, before its router; only if overridden
               on_layer_routed(routing)               before its experts run
               compute_order(routing, resident)       pull; only if overridden
               streams(routing, missing)              pull, where the layer misses many; only if overridden
               victims(request)                       pull, when the misses do not fit
               take_requests()                        pull, when the misses are on their way; only if it ``asks``
               on_prediction(prediction)              the answers of providers that answer at once
               on_evicted, on_transfer_done/failed    as it happens
               on_experts_done(step, layer, experts)  batched: whenever it suits the engine, at the latest with
               on_layer_done(step, layer)             the layer's end
    any time   on_prediction, on_artifact_swapped, on_budget_changed

**Actions are pulled.** What a policy *wants* stands in two attributes. The engine reads them when a layer is entered,
routed and done, and after a prediction; it acts when the object is a new one:

    policy.prefetch   priorities over all keys, one array; replaces the one before it, queued or not
    policy.target     a set that should be resident in a tier, filled when no prefetch waits

What the engine must *ask* is a method: ``victims`` (called once for all misses of a layer), ``compute_order``,
``row_mask``. ``take_requests`` hands over requests for predictions. The engine passes them to the providers, which
answer through ``on_prediction`` later, or never.

An on-demand fetch of layer L is thus: ``on_layer_routed(routing)``; missing = routing.experts not resident;
``victims(VictimRequest(tier, bytes of what does not fit, evictable, resident, incoming=missing))``; evict those,
``on_evicted``; fetch; ``on_transfer_done`` for each. All of ``routing.experts`` are unevictable from
``on_layer_routed`` until they have run. Where a layer's experts outnumber the slots, the engine computes in waves:
those that have run become evictable, and it asks again.

What only services ask is in ``service_interface``.
"""

# Events that do nothing by default are the point of the base class.
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from greenroom.policies.base.array_types import Keys, Mask, Scores
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
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.picks_predictor import PicksPredictor
from greenroom.policies.base.service_interface import ServiceInterface


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """Which experts to bring nearer, most urgent first. Immutable once published: a change is a new object.

    ``priority[N]``: higher is sooner, 0 or less is not wanted. Among equals the lower key goes first.
    ``may_evict[N]``: those that may displace a resident expert; the others only fill free slots (None: all may).
    An on-demand fetch overtakes all of it. An expert on disk is brought to the host and then to the device. With
    ``tier`` HOST it stops at the host, after everything that goes to the device. An expert on the device is near enough
    for either tier.
    """

    generation: int
    priority: Scores
    may_evict: Mask | None = None
    tier: Tier = Tier.DEVICE
    wanted: Mask = field(init=False)
    """``[N]``: whose priority is above 0. It is asked for several times a layer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "wanted", self.priority > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The set that ``tier`` should hold. Immutable once published: a change is a new object.

    Missing members are fetched in key order, hence layer after layer, while no prefetch waits. Only experts outside
    the set make room for them. With ``drop_others`` those outside are evicted even where the room is not needed. Where
    not all members fit, the first in key order are held.

    In a target for the HOST, members on the device count as held: they are not read, and their copies on the host make
    room for members that are on neither tier.
    """

    generation: int
    wanted: Mask
    tier: Tier = Tier.DEVICE
    drop_others: bool = False


class ExpertPolicy(ServiceInterface, ABC):
    """Base of all expert policies: events that do nothing, wants that are empty, and ``victims`` to be written.

    Invariants for every policy (the contract suite holds them): what it answers depends on the events and
    arguments alone, so equal histories give equal answers; it never writes to what it is given; it has no clock,
    no thread and no I/O.
    """

    hooks: frozenset[str] = frozenset()
    """Names of the methods that this class overrides; the engine calls no other event. An object whose options make one
    of them useless may take it out of its own ``hooks`` when it is made."""

    asks: ClassVar[frozenset[str]] = frozenset()
    """Kinds of predictions that this class may request. Where there are none, ``take_requests`` is never called."""

    only_ahead: ClassVar[bool] = False
    """Whether the class differs from a replacement rule only by what it wants ahead of need. Then a replay that fetches
    on demand alone shows nothing of its own."""

    slot_by_slot: ClassVar[bool] = False
    """Whether what is wanted ahead comes into each slot as soon as the slot's expert has run. Else a layer gives up its
    slots together, unless others of its own experts wait for them, which takes the engine less."""

    answered_at_once: frozenset[str] = frozenset()
    """Kinds of predictions whose requests at ``on_layer_routed`` are answered before anything is fetched ahead. The
    engine says so, once a provider does. A policy may leave deciding to that answer."""

    predictors: tuple[PicksPredictor, ...] = ()
    """Of the policy's own, which the engine runs. They answer kinds that it ``asks``."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.hooks = frozenset(
            name
            for name in dir(ExpertPolicy)
            if not name.startswith("_") and callable(method := getattr(ExpertPolicy, name))
            if getattr(cls, name) is not method
        )

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.prefetch: Prefetch | None = None
        self.target: Target | None = None
        self._requests: dict[str, PredictionRequest] = {}

    # -- any time -----------------------------------------------------------------------------------------------------

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        """What the tier may hold. Called for every tier at the start. Where a budget shrinks later, ``victims`` follows
        for Reason.BUDGET.
        """

    def on_prediction(self, prediction: Prediction) -> None:
        """A provider has answered, perhaps late or twice (see Prediction)."""

    def on_artifact_swapped(self, artifact: Artifact) -> None:
        """From now on predictions are made with this version."""

    # -- sequences ----------------------------------------------------------------------------------------------------

    def on_sequence_queued(self, sequence: SequenceInfo) -> None:
        """A request has arrived and waits."""

    def on_sequence_started(self, sequence: SequenceInfo) -> None:
        """The request joins with the next step."""

    def on_sequence_preempted(self, sequence: SequenceInfo) -> None:
        """The request has given up its KV and waits. All its rows so far will run again: forget what they routed."""

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        """The request has left. It may never have started."""

    # -- steps and their layers, in this order ------------------------------------------------------------------------

    def on_step_planned(self, step: Step) -> None:
        """The batch policy planned several forwards together, and this one follows the one that is about to start.

        Called before that one's ``on_step_started``, so that what is wanted crosses the border of steps (ExpertFlow,
        section 4.2). ``step``: its rows, tokens and paths as they are planned; its number if nothing fails. The plan
        holds for one step. If sequences end meanwhile, the planned step comes with fewer rows or not at all.
        """

    def on_step_started(self, step: Step) -> None:
        """A forward begins."""

    def on_layer_entered(self, step: Step, layer: int) -> None:
        """The layer's attention is about to run."""

    def row_mask(self, step: Step, layer: int, resident: Mask) -> Mask | None:
        """Which experts each row may be routed to: ``[T, experts of the layer]``, at least top-k true in a row.

        Applied to the router's logits before the model's own top-k and normalisation. None: all. Anything else makes
        the output approximate, so the engine asks only where approximation was opted into.
        """
        return None

    def on_layer_routed(self, routing: LayerRouting) -> None:
        """The layer's experts are known and about to run."""

    def compute_order(self, routing: LayerRouting, resident: Mask) -> Keys | None:
        """The order in which the layer's experts are fetched and computed: a permutation of ``routing.experts``.

        None: resident experts first, the others as they land. The layer's result does not depend on the order.
        """
        return None

    def streams(self, routing: LayerRouting, missing: Keys) -> bool:
        """Whether the layer passes its ``missing`` experts through a few slots (DuoServe-MoE §5.2).

        Each is fetched as another has run, so that few others must leave for them, and those that have run compete with
        all residents for staying. Asked only where more are missing than keep the link busy. False: as many as slots
        can be freed for are fetched at once, and those of the layer leave last.
        """
        return False

    @abstractmethod
    def victims(self, request: VictimRequest) -> Keys:
        """Which experts leave ``request.tier``: distinct keys out of ``request.evictable``, the first to go first.

        Together they free at least ``bytes_needed``, and each of them is needed for that. Empty is a refusal. A policy
        may refuse a PREFETCH or TARGET whose incoming experts are worth less than the victims; the engine then drops
        that fetch until priorities change. It refuses ON_DEMAND and BUDGET only where all evictable experts together
        do not free enough. Changes nothing in the policy: ``on_evicted`` follows for what was evicted.
        """

    def take_requests(self) -> tuple[PredictionRequest, ...]:
        """Hand over the requests for predictions made since the last call: the newest of each kind."""
        if not self._requests:
            return ()
        requests = tuple(self._requests.values())
        self._requests.clear()
        return requests

    def on_experts_done(self, step: Step, layer: int, experts: Keys) -> None:
        """These experts of the layer have run and may leave."""

    def on_layer_done(self, step: Step, layer: int) -> None:
        """All of the layer's experts have run."""

    # -- movements, as they happen ------------------------------------------------------------------------------------

    def on_evicted(self, tier: Tier, experts: Keys) -> None:
        """These experts have left the tier."""

    def on_transfer_done(self, transfer: Transfer) -> None:
        """The expert has arrived in ``transfer.target``."""

    def on_transfer_failed(self, transfer: Transfer) -> None:
        """The expert did not arrive. It is still where it was."""

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _ask(self, request: PredictionRequest) -> None:
        """Leave a request for a prediction. It replaces one of the same kind that was not taken yet."""
        self._requests.pop(request.kind, None)
        self._requests[request.kind] = request
