"""Which of many EAMs stand for all of them (MoE-Infinity, §4.2, "EAMC construction")."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.moe_infinity.eamc import unit_layers
from greenroom.predictor.kinds.config import CAPACITY

_STARTS: Final = 2
"""Runs of k-means, each from other centres. The best is taken."""
_ROUNDS: Final = 25


def check_library() -> None:
    """Raises InvalidConfig where faiss is not installed. To be called before anything long is run for it."""
    if importlib.util.find_spec("faiss") is None:
        raise InvalidConfig("eamc", "k-means", "that of faiss, which is not installed: pip install 'greenroom[eamc]'")


def shape_of(experts_per_layer: Sequence[int]) -> Catalogue:
    """A catalogue that says where experts lie, and nothing of their size."""
    layers = len(experts_per_layer)
    return Catalogue("eamc", experts_per_layer=experts_per_layer, top_k=[0] * layers, expert_bytes=[1] * layers)


def choose_members(
    experts_per_layer: Sequence[int], matrices: npt.NDArray[np.number], *, capacity: int = CAPACITY, seed: int = 0
) -> npt.NDArray[np.intp]:
    """Which rows of ``matrices[n, N]``, tokens by expert of a sequence each, are the members: ascending, at most
    ``capacity``.

    K-means with the distance of Eq. 1: of rows whose layers have the length 1, the squared distance is 2 L times that.
    Of each cluster the row nearest to the centroid is a member. Where there are at most ``capacity`` distinct rows, all
    of them are. The same rows and seed choose the same. Raises InvalidConfig where nothing can be chosen.
    """
    if capacity < 1:
        raise InvalidConfig("capacity", capacity, "at least 1")
    catalogue = shape_of(experts_per_layer)
    used = np.flatnonzero(matrices.any(axis=1))
    if not len(used):
        raise InvalidConfig("matrices", len(matrices), "at least one sequence whose tokens were routed")
    unit = unit_layers(catalogue, matrices[used].astype(np.float32))
    _, firsts = np.unique(unit.round(6), axis=0, return_index=True)
    if len(firsts) <= capacity:
        return np.sort(used[firsts])
    labels, centres = _clustered(unit, capacity, seed)
    cosines = np.einsum("ne,ne->n", unit, unit_layers(catalogue, centres)[labels])
    order = np.lexsort((np.arange(len(unit)), -cosines))
    _, nearest = np.unique(labels[order], return_index=True)
    return np.sort(used[order[nearest]])


def _clustered(
    unit: npt.NDArray[np.float32], capacity: int, seed: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """The cluster of each row, and the clusters' centres."""
    check_library()
    import faiss

    kmeans = faiss.Kmeans(
        unit.shape[1], capacity, niter=_ROUNDS, nredo=_STARTS, seed=seed,
        min_points_per_centroid=1, max_points_per_centroid=len(unit),  # neither a warning nor a sample
        init_method=faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS,
    )  # fmt: skip
    kmeans.train(unit)
    assert kmeans.centroids is not None, "k-means that was trained has centres"
    _, labels = kmeans.index.search(unit, 1)
    return labels[:, 0].astype(np.intp), kmeans.centroids
