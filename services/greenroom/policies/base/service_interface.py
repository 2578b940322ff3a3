"""What a service asks of an expert policy, beside what the engine asks. Every answer has a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from greenroom.policies.base.array_types import Ids, Keys, Scores
from greenroom.policies.base.events import Artifact


class ServiceInterface:
    """The part of ``ExpertPolicy`` that a worker uses. No decision of a replay depends on it."""

    artifacts: ClassVar[frozenset[str]] = frozenset()
    """Kinds of artifacts that this class predicts by. The worker hands over their newest versions."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """Those of them without which the policy is refused."""

    def fill_order(self) -> Keys | None:
        """The order in which the tiers are filled at the start: a permutation of all keys.

        The device gets as many of them as it holds, after its target and what it held before a restart. The host gets
        those after them. None: only the device is filled, with expert 0 of every layer, expert 1 of every layer, and
        so on.
        """
        return None

    def prepare(self, artifact: Artifact) -> Artifact:
        """Do beforehand what takes long about swapping to ``artifact``. Changes nothing in the policy.

        ``on_artifact_swapped`` is then called with what this returns. The call is optional, and may come from another
        thread than the pool's. Raises InvalidConfig for an artifact that the policy can not use.
        """
        return artifact

    def loads_by_task(self) -> Mapping[str, int]:
        """By task type: how many experts one more request of it would bring to the device.

        A type that is missing is unknown. May be called from another thread than the pool's.
        """
        return {}

    def past_logits(self, sequences: Ids) -> Scores | None:
        """``[S, N]``: the logit of the chance that each sequence's next token uses each expert, by its use so far.

        NaN for a sequence that has not used any. None: the policy keeps no such thing.

        Changes nothing. What foretells paths from tokens takes it for the past, so that it is tracked once.
        """
        return None

    def report(self, sequence: int) -> Mapping[str, float]:
        """Figures about a sequence that has just ended, such as its prefetch recall. They go into its routing trace.

        Called once, right after ``on_sequence_ended``.
        """
        return {}
