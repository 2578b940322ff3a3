"""Three points on the real engine: the widened bundled model, its experts read from this disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.duoserve.serving.arms import BASE, PHASES, Arm
from benchmarks.duoserve.serving.figures import Slo, over, rate_of, summary
from benchmarks.duoserve.serving.open_loop import Answered, WallClock, serve
from benchmarks.duoserve.serving.requests import Request, requests_of
from benchmarks.harness.closing import Closing
from benchmarks.harness.inputs.shared_model import KV_BYTES, SharedModel
from benchmarks.harness.rounds import rotated
from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.generation import GenerationRequest, SamplingParams
from greenroom.demo.tasks import TASKS, sample
from greenroom.experts.copying.disk_calibration import load_or_measure
from greenroom.experts.engine import EngineConfig, ExpertEngine
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.registry import create_policy
from greenroom.worker.model.expert_moves import EngineMoves
from greenroom.worker.model.warm_start import first_residents

ARMS = (BASE, PHASES)
LONGEST_PROMPT, LONGEST_ANSWER = 512, 128
SLOTS = 1 / 3


@dataclass(frozen=True, slots=True)
class Points:
    """``loads``: multiples of saturation. ``requests``: of a run. ``seeds``: runs of each point and policy.
    ``shorter``: Azure's lengths are divided by so much, since the model takes 1,024 tokens a request.
    """

    loads: tuple[float, ...] = (0.25, 0.5, 1.0)
    requests: int = 8
    seeds: int = 2
    shorter: float = 4.0

    @property
    def runs(self) -> int:
        return 2 + self.seeds * len(self.loads) * len(ARMS)


class RealArm(Closing):
    """``batching`` with 512 rows a step, which hold every prompt here."""

    def __init__(self, arm: Arm, shared: SharedModel, files: Sequence[ArtifactFile]) -> None:
        catalogue = shared.catalogue
        policy = create_policy("duoserve", catalogue=catalogue)
        for file in files:
            if file.KIND in policy.artifacts:
                policy.on_artifact_swapped(artifact_of(catalogue, file, "bundled"))
        slots = EngineConfig(round(SLOTS * catalogue.size))
        self._shared = shared
        self.experts = ExpertEngine(shared.pack, catalogue, policy, slots, hardware=shared.hardware)
        try:
            self.experts.preload(first_residents(catalogue, [], policy.target, policy.fill_order()))
            self._clock = WallClock()
            self._batch = BatchEngine(
                shared.model,
                BatchConfig(KV_BYTES, max_running=arm.config.max_running, prefill_chunk=arm.chunk),
                arm.policy(),
                observer=self.experts,
                moves=EngineMoves(self.experts, load_or_measure(shared.pack)),
                clock=self._clock.now,
            )
        except BaseException:
            self.experts.close()
            raise

    def run(self, requests: Sequence[tuple[float, GenerationRequest]]) -> list[Answered]:
        self._shared.attach(self.experts)
        return serve(self._batch, requests, self._clock)

    @property
    def balanced_rows(self) -> float | None:
        return self._batch.costs.balanced_rows

    def close(self) -> None:
        self.experts.close()


def measure(
    shared: SharedModel, files: Sequence[ArtifactFile], scale: Points, update: Callable[[], object]
) -> dict[str, Any]:
    """``points``: each load's figures by policy and seed. Policies take turns on the same requests."""
    arms: dict[str, RealArm] = {}
    try:
        for arm in ARMS:
            arms[arm.name] = RealArm(arm, shared, files)
        at_once = [one.at_rate(1e9) for one in _requests(scale, 0)]
        base = arms[BASE.name]
        base.run(_asked(shared, at_once, 0))  # warms up
        update()
        answered = base.run(_asked(shared, at_once, 0))
        update()
        saturation = rate_of(answered)
        mean = [Request(0.0, round(1155 / scale.shorter), round(211 / scale.shorter))]
        slo = Slo.of(base.run(_asked(shared, mean, 0))[0])
        found: dict[float, dict[str, list[dict[str, Any]]]] = {}
        for seed in range(scale.seeds):
            for load in scale.loads:
                asked = _asked(shared, [one.at_rate(load * saturation) for one in _requests(scale, seed)], seed)
                for name in rotated([arm.name for arm in ARMS], seed):
                    own = found.setdefault(load, {}).setdefault(name, [])
                    own.append(summary(arms[name].run(asked), slo))
                    update()
        rows = {name: own.balanced_rows for name, own in arms.items()}
    finally:
        for opened in arms.values():
            opened.close()
    points = [
        {"load": load, "arm": name, "runs": runs, "over_fcfs": over(runs, own[BASE.name])}
        for load, own in found.items()
        for name, runs in own.items()
    ]
    slos = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
    return {"saturation": saturation, "slo": slos, "balanced_rows": rows, "points": points}


def _requests(scale: Points, seed: int) -> list[Request]:
    return [
        Request(one.at_s, min(one.prompt, LONGEST_PROMPT), min(one.answer, LONGEST_ANSWER))
        for one in requests_of(scale.requests, seed, shorter=scale.shorter)
    ]


def _asked(shared: SharedModel, requests: Sequence[Request], seed: int) -> list[tuple[float, GenerationRequest]]:
    """Prompts are the tasks' own, as many of one task after the other as make the length."""
    random = Random(f"real/{seed}")
    found = []
    for number, one in enumerate(requests):
        task, ids = random.choice(TASKS), list[int]()
        while len(ids) < one.prompt:
            drawn = sample(task, seed=seed, index=1000 * number + len(ids))
            ids += shared.ask(drawn.task, drawn.prompt, drawn.answer).prompt_ids
        sampling = SamplingParams(temperature=0.0, max_tokens=one.answer, ignore_eos=True)
        found.append((one.at_s, GenerationRequest(f"{seed}-{number}", tuple(ids[: one.prompt]), sampling)))
    return found
