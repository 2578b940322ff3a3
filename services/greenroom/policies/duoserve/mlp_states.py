"""The input of ExpertMLP (DuoServe-MoE, §4.2, Eqs 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile, MlpForm

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class MlpShares:
    """``popularity[L, E]`` (Eq. 2): how a layer's picks spread over its experts. ``affinity[L - a, E, E]`` (Eq. 3), for
    picks ``ahead`` = a layers apart: how the picks of layer l + a spread, given that the token picked i in layer l.

    Rows have the sum 1. E is the largest number of experts of a layer; a smaller layer has zeros behind its own.
    """

    ahead: int
    popularity: Array
    affinity: Array


@dataclass(frozen=True, slots=True, eq=False)
class StateConstructor:
    """Puts the states of tokens together, before layers that they have not reached.

    The state of layer t is s = [h, p, a]. h: what the token picked in each layer up to t − ``ahead``, zeros for later
    ones. p: the popularity of layer t. a: the affinity rows of the ``top_k`` experts picked in layer t − ``ahead``. As
    printed, h has ``top_k`` numbers a layer, an expert's index from 1 on (0: no pick). With ``many_hot`` it has one a
    layer and expert, which is 1 where it was picked.
    """

    shares: MlpShares
    top_k: int
    many_hot: bool = False

    @classmethod
    def of_file(cls, file: ExpertMlpFile) -> StateConstructor:
        form = file.of
        shares = MlpShares(form.ahead, file.popularity.astype(np.float32), file.affinity.astype(np.float32))
        return cls(shares, form.top_k, form.many_hot)

    @property
    def form(self) -> MlpForm:
        return MlpForm(self.shares.ahead, self.top_k, self.many_hot)

    @property
    def width(self) -> int:
        """How long a state is."""
        layers, experts = self.shares.popularity.shape
        return self.form.state_width(layers, experts)

    def states(self, picks: NDArray[np.integer], layers: NDArray[np.integer]) -> Array:
        """``[n, width]``: of tokens with ``picks[n, L, k]``, before ``layers[n]``, each from ``ahead`` on.

        A pick at or above the number of experts is none. What a token picks later than ``ahead`` layers before its
        layer is not looked at.
        """
        shares, ahead = self.shares, self.shares.ahead
        count, experts = len(picks), shares.popularity.shape[1]
        known = np.minimum(picks[:, :-ahead].astype(np.intp), experts)
        last = layers.astype(np.intp) - ahead
        from_last = known[np.arange(count), last]
        known[np.arange(known.shape[1]) > last[:, None]] = experts
        affinity = shares.affinity[last[:, None], np.minimum(from_last, experts - 1)]
        affinity[from_last == experts] = 0
        history = many_hot(known, experts) if self.many_hot else np.where(known < experts, known + 1, 0)
        return np.concatenate(
            (
                history.reshape(count, -1).astype(np.float32),
                shares.popularity[layers],
                affinity.reshape(count, -1),
            ),
            axis=1,
        )


def many_hot(picks: NDArray[np.integer], experts: int) -> Array:
    """``[..., experts]`` of ``picks[..., k]``: 1 where picked. A pick at or above ``experts`` is none."""
    found: Array = np.zeros((*picks.shape[:-1], experts + 1), dtype=np.float32)
    np.put_along_axis(found, np.minimum(picks.astype(np.intp), experts), 1, axis=-1)
    return found[..., :experts]
