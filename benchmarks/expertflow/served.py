"""The widened bundled model on the real engine, and what was learnt from other prompts' routing."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.expertflow.routings import Files, tables
from benchmarks.harness.arms.disk_link import DiskLink
from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.learnt_files import Learnt
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.closing import Closing
from benchmarks.harness.inputs.bundled_routing import record_routing
from benchmarks.harness.inputs.checkpoints import EXPERT_MIB, widened
from benchmarks.harness.inputs.fitted import FitBoth, fitted_files
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.shared_model import KV_BYTES, Ask, SharedModel
from benchmarks.harness.inputs.task_prompts import in_turn, to_learn_from
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.policies.expertflow.policy import PATHS
from greenroom.policies.expertflow.token_tables import TokenTables
from greenroom.policies.registry import policy_class

TOKENS_PER_STEP = 1024
"""So that every prompt runs whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScale:
    """``expert_mib``: MiB of an expert. ``recorded``: prompts that the files are fitted to; none of them is
    measured."""

    expert_mib: float = EXPERT_MIB
    recorded: int = 300
    fit: FitBoth = field(default_factory=FitBoth)


class ServedModel(Closing):
    """A context manager. ``link``: its disk."""

    def __init__(self, scale: ModelScale) -> None:
        self.shared = SharedModel(widened(scale.expert_mib))
        try:
            self.link = DiskLink(self.shared.pack.path, self.shared.expert_bytes)
            trace, kept = record_routing(to_learn_from(scale.recorded)), Kept.usual()
            reuse, path = fitted_files("widened", trace, scale.fit, kept)
            self.files = Files(reuse, path, tables("widened", trace, reuse, scale.fit, kept))
            self.learnt = Learnt(self.files.each)
        except BaseException:
            self.shared.close()
            raise

    @property
    def tables_bytes(self) -> int:
        """What the predictor takes in memory."""
        return TokenTables(self.files.paths, self.shared.catalogue).nbytes

    def asks(self, count: int) -> list[Ask]:
        """Prompts, none of which was learnt from."""
        return in_turn(self.shared, count)

    def arm(self, kind: Kind, share: float, batching: BatchPolicy | None = None) -> EngineArm:
        """Paths are foretold for a policy, or a batch policy, that reads them. Raises GreenroomError."""
        batch = BatchConfig(KV_BYTES, tokens_per_step=TOKENS_PER_STEP)
        reads = PATHS in policy_class(kind.policy, kind.options).artifacts
        reads = reads or (batching is not None and batching.reads_paths)
        artifacts = self.learnt.artifacts(kind.policy, self.shared.catalogue)
        paths = self._foretells if reads else None
        return EngineArm(kind, self.shared, share, artifacts, batching=batching, batch=batch, paths=paths)

    def _foretells(self, policy: ExpertPolicy) -> TokenPaths:
        return TokenTables(self.files.paths, policy.catalogue, policy.past_logits)

    def close(self) -> None:
        self.shared.detach()
        self.link.close()
        self.shared.close()
