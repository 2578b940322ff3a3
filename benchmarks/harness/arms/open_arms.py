"""All arms at one share of the experts, open at once on one loaded model."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.learnt_files import Learnt
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.closing import Closing
from benchmarks.harness.inputs.shared_model import SharedModel
from greenroom.core.errors import GreenroomError


class Fleet(Closing):
    """A context manager. ``failed``: why arms could not be opened, by name."""

    def __init__(self, shared: SharedModel, learnt: Learnt, share: float, kinds: Sequence[Kind]) -> None:
        self.shared = shared
        self.share = share
        self.arms: list[EngineArm] = []
        self.failed: dict[str, str] = {}
        try:
            for kind in kinds:
                self._open(kind, learnt)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> EngineArm:
        """Raises LookupError."""
        for arm in self.arms:
            if arm.kind.name == name:
                return arm
        raise LookupError(f"no arm {name!r}: {self.failed.get(name, 'it was not asked for')}")

    def _open(self, kind: Kind, learnt: Learnt) -> None:
        try:
            artifacts = learnt.artifacts(kind.policy, self.shared.catalogue)
            self.arms.append(EngineArm(kind, self.shared, self.share, artifacts))
        except GreenroomError as error:
            self.failed[kind.name] = str(error)

    def close(self) -> None:
        for arm in self.arms:
            arm.close()
        self.arms.clear()
        self.shared.detach()
        gc.collect()  # an engine and its policy refer to each other; their arenas would stay
