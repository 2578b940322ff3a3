"""The file that defines a collaboration of experts: its experts, the first one of a request, and what follows them.

docs/architecture/coe.md describes it. CoServe (ASPLOS 2025, doi 10.1145/3676641.3715986), sections 2.1 and 4.5.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from greenroom.core.collaboration import MAX_VALUES, MAX_VALUES_BYTES, TAKEN_NAMES, VALUE_BYTES
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB

MAX_FILE_BYTES: Final = 16 * MIB
_NEAR: Final = 3
"""So many near names are shown where one is not known. There may be hundreds."""
_ROUNDING: Final = 1e-9
_ENDPOINTS: Final = frozenset({"infer", "ready", "versions"})
"""What the path of a model's endpoints goes on with."""
_DOTS: Final = frozenset({".", ".."})
"""What clients take out of a path."""

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Share = Annotated[float, Meta(ge=0, le=1)]
Above = Annotated[float, Meta(gt=0, le=1e15)]  # finite, as sums of them are


class EdgeDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request goes on to ``expert`` if its result so far fulfils every condition that is given.

    ``label`` or ``labels``: one of these is its label. ``least_score``, ``below_score``: bounds of its score.
    ``probability``: the share of the requests at this edge's start that take it; None: not known.
    """

    expert: Name
    label: Name | None = None
    labels: Annotated[tuple[Name, ...], Meta(min_length=1)] = ()
    least_score: Share | None = None
    below_score: Share | None = None
    probability: Share | None = None

    @property
    def all_labels(self) -> frozenset[str]:
        """Empty: any label."""
        return frozenset(self.labels if self.label is None else (self.label, *self.labels))

    @property
    def conditional(self) -> bool:
        return bool(self.all_labels) or self.least_score is not None or self.below_score is not None

    def holds(self, label: str | None, score: float | None) -> bool:
        """Whether a result fulfils it. ``None``: the result has none, as an embedding, which fulfils no condition."""
        if self.all_labels and label not in self.all_labels:
            return False
        if self.least_score is not None and not (score is not None and score >= self.least_score):
            return False
        return self.below_score is None or (score is not None and score < self.below_score)


class ExpertDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model``: its checkpoint, a folder beside the file or a hub id. ``next``: the first edge that holds is taken."""

    model: Name
    revision: str | None = None
    next: tuple[EdgeDefinition, ...] = ()


class RouterDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which expert a request needs first: by its ``parameter``, or by the label that ``expert`` gives it.

    ``first``: the expert for each value of the parameter, or label. Empty: the value is the expert's name.
    """

    parameter: Name | None = None
    expert: Name | None = None
    first: dict[Name, Name] = {}


class CoeDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``quantities``: how often each value of the router comes, in any unit. Empty: each is as likely.

    Invariants, checked where it is read: every name is known, no expert follows itself, a request can come to each, and
    the edges of an expert have probabilities that can be.
    """

    name: Name
    router: RouterDefinition
    experts: Annotated[dict[Name, ExpertDefinition], Meta(min_length=1)]
    quantities: dict[Name, Above] = {}

    @property
    def values(self) -> dict[str, str]:
        """By each value of the router, the expert that comes first or, of a router that is an expert, after it."""
        if self.router.first:
            return dict(self.router.first)
        followers = {edge.expert for expert in self.experts.values() for edge in expert.next}
        return {name: name for name in self.experts if name not in followers and name != self.router.expert}


def read_definition(path: Path) -> CoeDefinition:
    """Raises InvalidConfig, which names the file and what is wrong in it."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidConfig(str(path), f"{size} bytes", f"at most {MAX_FILE_BYTES}")
        definition = msgspec.toml.decode(path.read_bytes(), type=CoeDefinition)
    except OSError as error:
        raise InvalidConfig(str(path), error.strerror or str(error), "a readable file") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(path), str(error), "TOML as docs/architecture/coe.md describes it") from None
    check(definition, str(path))
    return definition


def check(definition: CoeDefinition, source: str = "coe") -> None:
    """Raises InvalidConfig where the invariants of ``CoeDefinition`` do not hold. ``source``: named in the error."""
    first, *others = definition.name.split("/")
    if taken := (_ENDPOINTS & set(others)) | (_DOTS & {first, *others}):
        raise InvalidConfig(f"{source}: name", definition.name, f"a name without {min(taken)!r} between slashes")
    _check_router(definition, source)
    for name, expert in definition.experts.items():
        _check_edges(definition, expert, f"{source}: experts.{name}.next")
    _check_cycles(definition, source)
    _check_reach(definition, source)


def followers_of(definition: CoeDefinition) -> dict[str, list[str]]:
    """By each expert's name, the experts that its result can lead to."""
    followers = {name: [edge.expert for edge in expert.next] for name, expert in definition.experts.items()}
    if definition.router.expert is not None:
        followers[definition.router.expert] = list(definition.values.values())
    return followers


def check_labels(definition: CoeDefinition, labels: Mapping[str, Collection[str]], source: str = "coe") -> None:
    """Whether each label that an edge or the router waits for is one that its expert gives.

    ``labels``: of each expert that has any, by its name. Raises InvalidConfig.
    """
    wanted = [
        (name, label, f"{source}: experts.{name}.next[{place}]")
        for name, expert in definition.experts.items()
        for place, edge in enumerate(expert.next)
        for label in sorted(edge.all_labels)
    ]
    router = definition.router
    if router.expert is not None:
        wanted += [(router.expert, value, f"{source}: router.first") for value in definition.values]
    for name, label, field in wanted:
        own = labels.get(name, ())
        if label not in own:
            raise InvalidConfig(field, label, _near(label, own, f"a label of {name!r}"))


def _check_router(definition: CoeDefinition, source: str) -> None:
    router, experts = definition.router, definition.experts
    if (router.parameter is None) == (router.expert is None):
        given = "both" if router.parameter is not None else "neither"
        raise InvalidConfig(f"{source}: router", given, "either `parameter` or `expert`")
    if router.parameter in TAKEN_NAMES:
        raise InvalidConfig(
            f"{source}: router.parameter",
            router.parameter,
            f"another name: calls have {', '.join(sorted(TAKEN_NAMES))} for something else",
        )
    if router.expert is not None:
        _known(router.expert, experts, f"{source}: router.expert")
        if experts[router.expert].next:
            raise InvalidConfig(
                f"{source}: experts.{router.expert}.next", "edges", "none: the router says what follows"
            )
    for value, expert in router.first.items():
        _known(expert, experts, f"{source}: router.first.{value}")
        if expert == router.expert:
            raise InvalidConfig(f"{source}: router.first.{value}", expert, "an expert other than the one that routes")
    values = definition.values
    if router.parameter is not None:
        _check_many(values, f"{source}: router.{'first' if router.first else 'parameter'}")
    if not values and router.expert is not None:
        raise InvalidConfig(f"{source}: router", router.expert, "experts that come after the one that routes")
    for value in definition.quantities:
        if value not in values:
            raise InvalidConfig(f"{source}: quantities", value, _near(value, values, "a value of the router"))


def _check_many(values: Collection[str], field: str) -> None:
    """A worker announces all values of a parameter, with all else that it serves."""
    if len(values) > MAX_VALUES:
        raise InvalidConfig(field, f"{len(values)} values", f"at most {MAX_VALUES}, since a worker announces them")
    size = sum(len(value.encode()) + VALUE_BYTES for value in values)
    if size > MAX_VALUES_BYTES:
        raise InvalidConfig(
            field,
            f"{len(values)} values of {size} bytes",
            f"at most {MAX_VALUES_BYTES} bytes, {VALUE_BYTES} of them for each value: shorten them, since a worker "
            "announces them",
        )


def _check_edges(definition: CoeDefinition, expert: ExpertDefinition, field: str) -> None:
    given = [edge.probability for edge in expert.next if edge.probability is not None]
    if sum(given) > 1 + _ROUNDING:
        raise InvalidConfig(field, sum(given), "probabilities of at most 1 in sum")
    for place, edge in enumerate(expert.next):
        own = f"{field}[{place}]"
        _known(edge.expert, definition.experts, f"{own}.expert")
        if edge.expert == definition.router.expert:
            raise InvalidConfig(f"{own}.expert", edge.expert, "an expert that does not route: it comes first")
        if edge.least_score is not None and edge.below_score is not None and edge.least_score >= edge.below_score:
            raise InvalidConfig(own, f"{edge.least_score} to {edge.below_score}", "`least_score` under `below_score`")
        if not edge.conditional and place + 1 < len(expert.next):
            raise InvalidConfig(own, "no condition", "a condition, or the last place: no later edge is ever taken")
    if (
        expert.next
        and not expert.next[-1].conditional
        and len(given) == len(expert.next)
        and sum(given) < 1 - _ROUNDING
    ):
        raise InvalidConfig(field, sum(given), "probabilities of 1 in sum: the last edge is taken where no other is")


def _check_cycles(definition: CoeDefinition, source: str) -> None:
    try:
        TopologicalSorter(followers_of(definition)).prepare()
    except CycleError as error:
        circle = " → ".join(reversed(error.args[1]))  # it names each behind the one that it leads to
        raise InvalidConfig(f"{source}: experts", circle, "no circle") from None


def _check_reach(definition: CoeDefinition, source: str) -> None:
    followers = followers_of(definition)
    todo = list(definition.values.values())
    if definition.router.expert is not None:
        todo.append(definition.router.expert)
    reached = set(todo)
    while todo:
        for name in followers[todo.pop()]:
            if name not in reached:
                reached.add(name)
                todo.append(name)
    for name in definition.experts:
        if name not in reached:
            raise InvalidConfig(f"{source}: experts", name, "experts that the router or an edge leads to")


def _known(name: str, experts: Collection[str], field: str) -> None:
    if name not in experts:
        raise InvalidConfig(field, name, _near(name, experts, "an expert of the file"))


def _near(name: str, known: Collection[str], what: str) -> str:
    near = difflib.get_close_matches(name, known, _NEAR)
    shown = ", ".join(near or sorted(known)[:_NEAR])
    return f"{what}, of which there are {len(known)}" + (f", such as {shown}" if shown else "")
