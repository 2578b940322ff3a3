"""A running collaboration whose experts are random bytes and whose results follow from the inputs alone."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from greenroom.coe.computing.expert_computer import Computed
from greenroom.coe.computing.expert_result import ExpertResult
from greenroom.coe.computing.inputs import Input
from greenroom.coe.graph.definition_file import CoeDefinition, EdgeDefinition, ExpertDefinition, RouterDefinition
from greenroom.coe.graph.expert_graph import ExpertGraph
from greenroom.coe.serving.engine import MOST_REQUESTS, ServingEngine, Wake
from greenroom.coe.serving.executor import Died, Ended, Executor
from greenroom.coe.serving.outcomes import Outcome
from greenroom.coe.serving.selection import Selection
from greenroom.core.errors import InvalidRequest
from greenroom.experts.copying.model_link import ModelLink
from greenroom.experts.model_memory import ModelMemory, catalogue_of_models
from greenroom.experts.pack.layout import PAGE_BYTES, ExpertWeights
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.placement.placement_policy import Costs
from tests.contract.coe.model_store import ModelStore, manifest_of, model_layer
from tests.waiting import DEADLINE_S

SELECTIONS = {
    "pull": Selection("pull"),
    "coserve": Selection("coserve"),
    "literal": Selection("coserve", policy_options={"literal": True}),
    "fcfs": Selection("fcfs"),
    "one memory": Selection("coserve", "lru", shared=True),
    "pull, lru": Selection("pull", "lru"),
}
BAD, CRASH, DEADLY = b"!bad", b"!crash", b"!deadly"


def _edge(to: str, label: str) -> EdgeDefinition:
    return EdgeDefinition(expert=to, label=label)


GRAPH = ExpertGraph(
    CoeDefinition(
        name="scripted",
        router=RouterDefinition(parameter="part", first={"a": "a", "b": "b", "c": "c", "d": "d"}),
        experts={
            "a": ExpertDefinition(model="m", next=(_edge("x", "0"), _edge("y", "1"))),
            "b": ExpertDefinition(model="m", next=(_edge("x", "1"),)),
            "c": ExpertDefinition(model="m", next=(_edge("y", "0"),)),
            "d": ExpertDefinition(model="m"),
            "x": ExpertDefinition(model="m", next=(_edge("y", "1"),)),
            "y": ExpertDefinition(model="m"),
        },
    )
)
PAGES = (1, 2, 1, 3, 2, 1)


def label_of(expert: int, given: Input) -> str:
    """The label is drawn from the input, another one for each expert."""
    assert isinstance(given, bytes)
    return str(given[0] >> expert & 1)


def path_of(given: bytes, value: str) -> list[tuple[str, str]]:
    """The experts that a request needs, with their labels."""
    path: list[tuple[str, str]] = []
    expert: int | None = GRAPH.first(value)
    while expert is not None:
        label = label_of(expert, given)
        path.append((GRAPH.names[expert], label))
        expert = GRAPH.after(expert, label, 1.0)
    return path


@dataclass
class ScriptedComputer:
    """Checks that the weights are the expert's own. ``held``: batches begin and wait until ``let``."""

    store: ModelStore
    held: bool = False
    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    begun: queue.Queue[tuple[int, int]] = field(default_factory=queue.Queue)

    def compute(self, expert: int, inputs: Sequence[Input], weights: ExpertWeights) -> list[Computed]:
        self.begun.put((expert, len(inputs)))
        if self.held:
            assert self.permits.acquire(timeout=DEADLINE_S)
        assert torch.equal(*(one[0].view(torch.uint8) for one in (weights, self.store.weights(expert))))
        if any(given == DEADLY for given in inputs):
            raise SystemExit
        if any(given == CRASH for given in inputs):
            raise ValueError("crash")
        return [
            InvalidRequest("bad") if given == BAD else ExpertResult(label_of(expert, given), 1.0) for given in inputs
        ]


@dataclass
class Told:
    """Outcomes by request, and how often each was told."""

    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    count: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def on_end(self, request_id: str) -> Callable[[Outcome], object]:
        def told(outcome: Outcome) -> None:
            self.outcomes.setdefault(request_id, []).append(outcome)
            self.count.release()

        return told

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.count.acquire(timeout=DEADLINE_S)


class Scripted:
    """``share``: of all experts' bytes, for all memories together, but at least the largest expert in each."""

    def __init__(
        self,
        selection: Selection,
        *,
        share: float = 0.5,
        executors: int = 2,
        most: int = 3,
        held: bool = False,
        read_timeout_s: float = 60.0,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        floats = PAGE_BYTES // 4
        manifest = manifest_of(
            [
                model_layer(name, [("w", (pages * floats,), "float32")])
                for name, pages in zip(GRAPH.names, PAGES, strict=True)
            ]
        )
        self.store = ModelStore(manifest)
        self.wake, inbox = Wake(), deque[Ended | Died]()
        self.link = ModelLink(self.store, on_posted=self.wake.set)
        catalogue = catalogue_of_models(manifest)
        dependencies = Dependencies(GRAPH.usage(), GRAPH.predecessors)
        count = 1 if selection.one_memory else executors
        each = max(max(PAGES), int(share * sum(PAGES) / count)) * PAGE_BYTES
        self.memories = [
            ModelMemory(self.link, selection.make_policy(catalogue, dependencies), each) for _ in range(count)
        ]
        names = [f"e{number}" for number in range(executors)]
        memories = {name: self.memories[at % count] for at, name in enumerate(names)}
        self.computers = [ScriptedComputer(self.store, held) for _ in names]

        def post(ended: Ended | Died) -> None:
            inbox.append(ended)
            self.wake.set()

        costs = Costs(token_ms=1.0, batch_ms=2.0, load_ms_by_expert=dict.fromkeys(range(len(PAGES)), 3.0))
        self.engine = ServingEngine(
            GRAPH,
            selection.make_dispatcher(names, memories, costs, dict.fromkeys(range(len(PAGES)), most)),
            [Executor(name, computer, post) for name, computer in zip(names, self.computers, strict=True)],
            memories,
            self.wake,
            inbox=inbox,
            most_requests=most_requests,
            read_timeout_s=read_timeout_s,
        )
        self.told = Told()

    def submit(self, request_id: str, given: bytes, value: str, deadline_s: float | None = None) -> None:
        self.engine.submit(request_id, given, value, on_end=self.told.on_end(request_id), deadline_s=deadline_s)

    def close(self) -> None:
        self.store.open()
        for computer in self.computers:
            computer.permits.release(1000)
        self.engine.close()
        for memory in self.memories:
            memory.close()
        self.link.close()

    def __enter__(self) -> Scripted:
        self.engine.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
