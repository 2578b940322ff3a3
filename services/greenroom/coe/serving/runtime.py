"""A collaboration, assembled: checkpoints, pack, costs, memories, executors and the engine on top."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections import deque
from types import TracebackType
from typing import Any, Self

import numpy as np
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.images import MAX_PIXELS
from greenroom.coe.computing.inputs import Preparations
from greenroom.coe.dispatch.first_fill import dealt
from greenroom.coe.loading.architecture import Architecture, build_architectures
from greenroom.coe.loading.collaboration import Collaboration, read_collaboration
from greenroom.coe.loading.expert_checkpoint import InputKind
from greenroom.coe.loading.packing import ensure_pack
from greenroom.coe.serving.config import ServingConfig
from greenroom.coe.serving.costs import KIND, ExecutorCosts, measure_quickly, profiled, try_each
from greenroom.coe.serving.engine import MOST_REQUESTS, ServingEngine, Wake
from greenroom.coe.serving.executor import Died, Ended, Executor
from greenroom.coe.serving.memory_plan import ExecutorNeeds, plan_memory
from greenroom.core.coe_profile import PROFILE_FILE, CoeProfile, load_coe_profile
from greenroom.core.errors import InvalidConfig
from greenroom.core.machine import machine_name
from greenroom.core.units import format_bytes
from greenroom.experts.copying.model_link import ModelLink
from greenroom.experts.model_memory import ModelMemory, catalogue_of_models
from greenroom.experts.pack.pack_file import PackFile
from greenroom.policies.base.dependencies import Dependencies

log = logging.getLogger(__name__)

MOST_BY_CORES = 4


class CollaborationRuntime:
    """A collaboration that serves, in ``engine``; a context manager that closes it.

    Construction does everything that takes long, with progress bars: packing at first use, measuring where there is no
    profile, filling the memory. Raises a GreenroomError that says what is wrong; then nothing is left running.
    """

    def __init__(
        self,
        config: ServingConfig,
        *,
        available_bytes: int | None = None,
        input_bytes: int = 0,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        """``available_bytes``: memory that there is. None: not known, so ``auto`` is all experts in each memory.
        ``input_bytes``: part of it, for the inputs of requests that are here. Whoever submits them heeds it.
        ``most_requests``: that the engine has at once, cancelled ones that are still computed included."""
        self.config = config
        self._most_requests = most_requests
        self._parts = contextlib.ExitStack()
        try:
            self._assemble(available_bytes, input_bytes)
        except BaseException:
            self._parts.close()
            raise

    def _assemble(self, available: int | None, inputs: int) -> None:
        config = self.config
        self.collaboration: Collaboration = read_collaboration(config.file, offline=config.offline)
        if not self._shows_progress:
            transformers_logging.disable_progress_bar()
        self.architectures: dict[str, Architecture] = build_architectures(self.collaboration, config.dtype)
        path = ensure_pack(self.collaboration, self.architectures, config.cache_dir, progress=config.progress)
        self.pack = self._parts.enter_context(contextlib.closing(PackFile.open(path)))
        self.sizes: tuple[int, ...] = tuple(self.pack.manifest.sizes())
        self.profile = self._load_profile()
        kind = None if self.profile is None else self.profile.of_kind(KIND)
        cores = config.threads or len(os.sched_getaffinity(0))
        count = config.executors or (min(MOST_BY_CORES, cores) if kind is None else kind.executors)
        profiled = None if kind is None or config.threads else kind.threads_by_executors.get(count)
        self.threads = profiled or max(1, cores // count)
        trial = None if kind is None else kind.trials.get(count)
        self.names = tuple(f"cpu{number}" for number in range(count))
        memories = 1 if config.selection.one_memory else count
        graph = self.collaboration.graph
        self.max_pixels = config.max_pixels or MAX_PIXELS
        # A line for each odd tag of an image's metadata is nothing that clients should write into a log.
        warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")
        preparations = Preparations(self.max_pixels)
        computers = [ExpertComputer(self.collaboration, self.architectures, preparations) for _ in self.names]
        self.costs = self._costs(computers[0], count).limited(config.most_batch)
        largest, share, chosen = self.costs.intermediates(), config.expert_share, None
        whole = sum(self.sizes) * memories + largest * count
        if kind is not None and trial is not None and whole > kind.memory_bytes:  # else nothing had to be divided
            chosen = trial.expert_bytes
            share = share or chosen / kind.memory_bytes
        self.plan = plan_memory(
            config.expert_memory,
            graph.names,
            self.sizes,
            memories,
            ExecutorNeeds(largest, self.costs.least_intermediates(), computers[0].preparing_bytes, count),
            available,
            share,
            strict_share=config.expert_share is not None,
            chosen=chosen,
            inputs=inputs,
        )
        self.most = self.costs.largest_batches(graph.names, self.plan.intermediates)
        self._start(computers)

    def _start(self, computers: list[ExpertComputer]) -> None:
        graph, selection = self.collaboration.graph, self.config.selection
        usage = graph.usage()
        if self.profile is not None:  # the same, or counted on a sample
            usage = np.array([self.profile.usage.get(name, 0.0) for name in graph.names])
        dependencies = Dependencies(usage, graph.predecessors)
        catalogue = catalogue_of_models(self.pack.manifest)
        wake, inbox = Wake(), deque[Ended | Died]()
        self.link = ModelLink(self.pack, on_posted=wake.set)
        self._parts.callback(self.link.close)
        self.memories: list[ModelMemory] = []
        for nbytes in self.plan.regions:
            memory = ModelMemory(self.link, selection.make_policy(catalogue, dependencies), nbytes)
            self._parts.callback(memory.close)
            self.memories.append(memory)
        by_name = {name: self.memories[at % len(self.memories)] for at, name in enumerate(self.names)}
        self._fill(dealt(dependencies.usage, self.sizes, self.plan.regions))

        def post(ended: Ended | Died) -> None:
            inbox.append(ended)
            wake.set()

        executors = [
            Executor(name, computer, post, self.threads) for name, computer in zip(self.names, computers, strict=True)
        ]
        dispatcher = selection.make_dispatcher(self.names, by_name, self.costs.costs, self.most)
        self.engine = ServingEngine(
            graph, dispatcher, executors, by_name, wake, inbox=inbox, most_requests=self._most_requests
        )
        self._parts.callback(self.engine.close)
        self.engine.start()

    def _load_profile(self) -> CoeProfile | None:
        """The one that was named, or the one beside the definition unless it can not be used."""
        beside = self.config.file.parent / PROFILE_FILE
        if self.config.profile is None and not beside.is_file():
            return None
        path = self.config.profile or beside
        names = self.collaboration.graph.names
        architectures = (expert.architecture for expert in self.collaboration.experts)
        try:
            profile = load_coe_profile(path)
            dtypes = {key: str(one.dtype).removeprefix("torch.") for key, one in self.architectures.items()}
            profile.check_of(self.collaboration.name, dict(zip(names, architectures, strict=True)), str(path), dtypes)
            profile.of_kind(KIND)
        except InvalidConfig as error:
            if self.config.profile is not None:
                raise
            log.warning("the collaboration goes without a profile, since the one beside it can not be used: %s", error)
            return None
        if (said := profile.said_of_machine(machine_name())) is not None:
            log.warning("%s", said)
        return profile

    def _costs(self, computer: ExpertComputer, executors: int) -> ExecutorCosts:
        what = "measuring" if self.profile is None else "trying"
        with self._bar(what, len(self.architectures), unit="architecture") as bar:
            about = self.collaboration, computer, self.pack, functools.partial(bar.update, 1)
            if self.profile is None:
                return measure_quickly(*about)
            try_each(*about)
            return profiled(self.profile, self.collaboration.graph.names, executors)

    def _fill(self, hands: list[list[int]]) -> None:
        total = sum(self.sizes[expert] for hand in hands for expert in hand)
        with self._bar("filling expert memory", total, unit="B", unit_scale=True, unit_divisor=1024) as bar:
            for memory, hand in zip(self.memories, hands, strict=True):
                for lost in memory.fill(hand, bar.update):
                    log.error(
                        "expert %s could not be read: %s", self.collaboration.graph.names[lost.expert], lost.error
                    )

    def _bar(self, what: str, total: int, **more: Any) -> tqdm[Any]:
        return tqdm(total=total, desc=what, disable=not self._shows_progress, file=sys.stderr, **more)

    @property
    def _shows_progress(self) -> bool:
        return sys.stderr.isatty() if self.config.progress is None else self.config.progress

    def _reads(self) -> str:
        kinds = {expert.takes for expert in self.collaboration.experts}
        images = [f"an image of at most {self.max_pixels} pixels"] if InputKind.IMAGE in kinds else []
        return " or ".join(images + (["a text"] if InputKind.TEXT in kinds else []))

    def describe(self) -> str:
        """What it is and what it has, a line each."""
        selection, plan = self.config.selection, self.plan
        memories = (
            "one for all" if len(plan.regions) == 1 else f"{len(plan.regions)} of {format_bytes(plan.regions[0])}"
        )
        batches = sorted(set(self.most.values()))
        sizes = str(batches[0]) if len(batches) == 1 else f"{batches[0]} to {batches[-1]}"
        rows = (
            ("collaboration", f"{self.collaboration.name} ({self.collaboration.file})"),
            (
                "experts",
                f"{len(self.sizes)}, {format_bytes(sum(self.sizes))}, of {len(self.architectures)} architectures",
            ),
            ("expert memory", f"{format_bytes(plan.experts)} ({memories})"),
            ("intermediates", f"{format_bytes(plan.intermediates)} for each executor, batches of at most {sizes}"),
            ("preparing", f"{format_bytes(plan.preparing)} for each executor, which reads {self._reads()} at a time"),
            *([("inputs", f"{format_bytes(plan.inputs)} for those of requests that are here")] if plan.inputs else []),
            ("memory", f"{format_bytes(plan.total)} in all, beside the program itself"),
            ("executors", f"{len(self.names)} of {self.threads} threads"),
            ("scheduling", f"{selection.scheduling_spelt}, policy {selection.policy_spelt}"),
            ("costs", "measured at the start" if self.profile is None else "of the profile"),
        )
        return "\n".join(f"{name:<16}{value}" for name, value in rows)

    def close(self) -> None:
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
