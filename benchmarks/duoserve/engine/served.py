"""The two models that the stage serves, each with its prompts, its disk, and what was learnt from other prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path

from benchmarks.duoserve.engine.scale import Scale
from benchmarks.harness.arms.disk_link import DiskLink
from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.learnt_files import Learnt
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.closing import Closing
from benchmarks.harness.inputs.bundled_rows import record_bundled_rows
from benchmarks.harness.inputs.checkpoints import random_mixtral, random_of_size, widened
from benchmarks.harness.inputs.fitted import fitted_files
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.shared_model import KV_BYTES, Ask, SharedModel
from benchmarks.harness.inputs.split_routing import digest_of
from benchmarks.harness.inputs.task_prompts import in_turn, to_learn_from
from benchmarks.harness.inputs.token_streams import random_stream
from benchmarks.harness.reporting.progress import progress
from greenroom.core.artifacts.residual_file import ResidualFile
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.routing import residual_fit
from greenroom.moe.routing.residual_maps import ResidualMaps
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.replay import RoutingTrace
from greenroom.replay.traces.recorder import TraceRecorder

SHARE = 0.33
"""As `--expert-memory 33%` has it."""
TOKENS_PER_STEP = 1024
"""So that every prompt runs whole."""
WHOLE = Kind("resident", "lru")


class Served(Closing):
    """A model, and what the policies know of it. A context manager. ``link``: its disk. ``maps``: of its residual
    stream, where they were fitted.
    """

    name: str
    maps: ResidualMaps | None = None

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.shared = SharedModel(folder)
        try:
            self.link = DiskLink(self.shared.pack.path, self.shared.expert_bytes)
            trace = self._to_learn_from(scale)
            self.learnt = Learnt(fitted_files(self.name, trace, scale.fit, Kept.usual()))
            self.learnt.facts["sequences"] = trace.sequences
        except BaseException:
            self.shared.close()
            raise

    @abstractmethod
    def asks(self, count: int) -> list[Ask]:
        """Prompts, none of which was learnt from."""

    @abstractmethod
    def _to_learn_from(self, scale: Scale) -> RoutingTrace: ...

    def arm(self, kind: Kind, share: float = SHARE, batching: BatchPolicy | None = None) -> EngineArm:
        """Raises GreenroomError."""
        artifacts = () if kind.bare else self.learnt.artifacts(kind.policy, self.shared.catalogue)
        batch = BatchConfig(KV_BYTES, tokens_per_step=TOKENS_PER_STEP)
        maps = self.maps if kind.maps else None
        return EngineArm(kind, self.shared, share, artifacts, batching=batching, batch=batch, maps=maps)

    def close(self) -> None:
        self.shared.detach()
        self.link.close()
        self.shared.close()


class Widened(Served):
    """The bundled model with large experts. Its routing is the bundled model's."""

    name = "widened"

    def __init__(self, scale: Scale) -> None:
        super().__init__(widened(scale.expert_mib), scale)

    def asks(self, count: int) -> list[Ask]:
        return in_turn(self.shared, count)

    def of_rows(self, rows: int, count: int) -> list[Ask]:
        """Prompts of so many tokens, one after the other out of the tasks' own, with one token of answer."""
        texts = cycle(ask.prompt_ids for ask in self.asks(50))
        tokens = chain.from_iterable(texts)
        return [Ask("long", tuple(islice(tokens, rows)), (0,)) for _ in range(count)]

    def _to_learn_from(self, scale: Scale) -> RoutingTrace:
        recorded = record_bundled_rows(to_learn_from(scale.recorded))
        with progress(recorded.trace.layers - 1, f"{self.name}: maps of the residual stream", "layer") as bar:
            file = Kept.usual().get(
                ResidualFile, digest_of(recorded.trace), scale.maps, (residual_fit,),
                lambda: residual_fit.fit(recorded.trace, recorded.rows, scale.maps, on_layer=lambda _: bar.update()),
            )  # fmt: skip
        self.maps = ResidualMaps(file, dtype=self.shared.loaded.dtype)
        return recorded.trace


class Random(Served):
    """A Mixtral of random weights, and prompts of random tokens: nobody knows more than popularity."""

    name = "random"

    def __init__(self, scale: Scale) -> None:
        super().__init__(random_mixtral(random_of_size(scale.random_mib)), scale)

    def asks(self, count: int) -> list[Ask]:
        return _random_asks(count, first=0)

    def _to_learn_from(self, scale: Scale) -> RoutingTrace:
        """Its own routing, while it is resident; of prompts after those that are measured."""
        with self._resident() as arm:
            recorder = TraceRecorder(arm.experts.catalogue)
            arm.experts.listener = recorder
            arm.run(_random_asks(scale.recorded // 2, first=200), scale.at_once)
            arm.experts.listener = None
            return recorder.trace(model=self.name)

    def _resident(self) -> EngineArm:
        return EngineArm(WHOLE, self.shared, 1.0)


def _random_asks(count: int, *, first: int) -> list[Ask]:
    """``count`` prompts from the ``first``-th of the stream on."""
    stream = random_stream(_VOCABULARY, first + count, tokens=16)
    chosen: Sequence[tuple[int, ...]] = stream.prompts[first:]
    return [Ask("random", prompt, (0,) * length) for prompt, length in zip(chosen, stream.lengths, strict=False)]


_VOCABULARY = 2048
