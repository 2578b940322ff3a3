"""The kinds by name. A new one is a line here; one that forecasts are made from has its name in
``core.artifacts.forecast_kinds``, where workers find it too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile
from greenroom.core.artifacts.forecast_kinds import EMOE_A, EMOE_L, STATISTICS
from greenroom.core.artifacts.path_file import PathFile
from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidRequest
from greenroom.predictor.kinds.config import BuildingConfig, LearningConfig
from greenroom.predictor.kinds.eamc.kind import EamcKind
from greenroom.predictor.kinds.emoe.kind import EmoeKind
from greenroom.predictor.kinds.expert_mlp.kind import ExpertMlpKind
from greenroom.predictor.kinds.path.kind import PathKind
from greenroom.predictor.kinds.paths.kind import PathsKind
from greenroom.predictor.kinds.reuse.kind import ReuseKind
from greenroom.predictor.making.kind import ForecastKind, Kind
from greenroom.predictor.making.subprocess_job import command_of

MAKE = command_of("greenroom.predictor.kinds.make")
"""What makes any of them."""

FORECAST_KINDS: Mapping[str, Callable[[LearningConfig], ForecastKind[Any]]] = {
    EMOE_A: partial(EmoeKind, EMOE_A),
    EMOE_L: partial(EmoeKind, EMOE_L),
}
"""Forecasts are made from them."""

POLICY_KINDS: Mapping[str, Callable[[BuildingConfig], Kind[Any]]] = {
    EamcFile.KIND: EamcKind,
    ReuseFile.KIND: ReuseKind,
    PathFile.KIND: PathKind,
    PathsFile.KIND: PathsKind,
    ExpertMlpFile.KIND: ExpertMlpKind,
}
"""The expert policies of workers take them. Of those that are due at once the first are made first: what is quick."""


def learning_of(learn: str, **others: Any) -> LearningConfig:
    """From a command line's word. ``others``: further fields. Raises InvalidConfig, UnknownName."""
    return LearningConfig.said(learn, FORECAST_KINDS, **others)


def building_of(build: str, **others: Any) -> BuildingConfig:
    """From a command line's word. ``others``: further fields. Raises InvalidConfig, UnknownName."""
    return BuildingConfig.said(build, POLICY_KINDS, **others)


def known_kind(name: str, param: str, names: Collection[str]) -> str:
    """``name``. Raises InvalidRequest, listing the names, where it is none of ``names``."""
    if name not in names:
        known = ", ".join((STATISTICS, *names))
        raise InvalidRequest(f"there is no {param} {name!r:.100}; known: {known}", param=param)
    return name
