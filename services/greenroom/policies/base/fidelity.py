"""What becomes of a row whose expert is not resident: the expert is loaded, or the row goes to resident ones.

eMoE (section 3.4) routes rows only to loaded experts, and loads those to which the running tasks are sensitive. Some
tasks are insensitive to the first layers: these may be routed otherwise without changing the answers (section 2.2.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.core.model_profile import ModelProfile
from greenroom.policies.base.array_types import Counts, Mask
from greenroom.policies.base.events import SequenceInfo, Step
from greenroom.policies.base.expert_keys import Catalogue

FIDELITIES = ("exact", "sensitive", "paper")


@dataclass(frozen=True, slots=True)
class Fidelity:
    """``exact``: every row gets the experts that its router picks. ``sensitive``: in the layers that its task is
    insensitive to, by the ``profile``, a row goes to resident experts only. ``paper``: every row does, in all layers.
    ``waits``: a layer whose rows are confined first waits until its experts in the policy's target have landed (eMoE,
    section 4); else it goes on with those that are resident.

    Raises InvalidConfig for another name, and for ``sensitive`` without a profile.
    """

    name: str = "exact"
    profile: ModelProfile | None = None
    waits: bool = True

    def __post_init__(self) -> None:
        check_fidelity(self.name, profiled=self.profile is not None)


def check_fidelity(name: str, *, profiled: bool) -> None:
    """Raises InvalidConfig as Fidelity does; ``profiled``: there is a profile."""
    if name not in FIDELITIES:
        raise InvalidConfig("fidelity", name, f"allowed: {', '.join(FIDELITIES)}")
    if name == "sensitive" and not profiled:
        raise InvalidConfig(
            "fidelity",
            name,
            "which tasks are sensitive to which layers stands in a profile: make one with `greenroom profile` and give "
            "its file as profile",
        )


def check_profile(profile: ModelProfile, catalogue: Catalogue, model: str) -> None:
    """Raises InvalidConfig where the profile is of a model of another shape than this one."""
    own = (catalogue.layers, int(catalogue.experts_per_layer.max()), int(catalogue.top_k.max()))
    if (profile.layers, profile.experts, profile.top_k) != own:
        theirs = _shape(profile.layers, profile.experts, profile.top_k)
        raise InvalidConfig(
            "profile",
            f"{profile.model} ({theirs})",
            f"{model} has {_shape(*own)}: give a profile that `greenroom profile` made of it",
        )


def _shape(layers: int, experts: int, top_k: int) -> str:
    return f"{layers} MoE layers of {experts} experts, {top_k} for a row"


class Confinement:
    """Which rows of a step are confined to resident experts. Its owner reports sequences and each step to it.

    The rows of a sequence that was never reported count as those of an unknown task, which is sensitive everywhere.
    """

    def __init__(self, fidelity: Fidelity, catalogue: Catalogue) -> None:
        self.all_rows = fidelity.name == "paper"
        """Whether all rows are confined, in all layers."""
        self._profile = fidelity.profile if fidelity.name == "sensitive" else None
        self._top_k: list[int] = catalogue.top_k.tolist()
        self._insensitive: dict[int, int] = {}  # by sequence: so many of the first layers, where there are any
        self._free_from: Counts | None = None  # [T]: the first layer in which the step's row is not confined
        self._last = catalogue.layers if self.all_rows else 0  # the first in which none of them is

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        layers = 0 if self._profile is None else self._profile.insensitive_layers(sequence.task)
        if layers:
            self._insensitive[sequence.sequence] = layers

    def sequence_ended(self, sequence: int) -> None:
        self._insensitive.pop(sequence, None)

    def step_started(self, step: Step) -> None:
        if self.all_rows or self._profile is None:
            return
        self._free_from, self._last = None, 0
        if not self._insensitive:
            return
        of_sequence = np.array([self._insensitive.get(one, 0) for one in step.sequences.tolist()], dtype=np.int64)
        if of_sequence.any():
            self._free_from = of_sequence[step.sequence_of_row]
            self._last = int(of_sequence.max())

    def confines(self, layer: int) -> bool:
        """Whether any row of the step may be confined in the layer."""
        return layer < self._last

    def confine(self, layer: int, here: Mask) -> Mask | None:
        """``[T, E]``: which experts the layer's router may pick for each row, given those that are ``here[1, E]``.

        ``here`` itself where all rows are confined. None where no row is: with fewer experts here than the router's
        top-k, too.
        """
        if layer >= self._last:
            return None
        count = int(np.count_nonzero(here))
        if count == here.size or count < self._top_k[layer]:
            return None
        if self._free_from is None:
            return here
        confined = self._free_from > layer
        if confined.all():
            return here
        mask = np.ones((len(confined), here.size), dtype=np.bool_)
        mask[confined] = here
        return mask
