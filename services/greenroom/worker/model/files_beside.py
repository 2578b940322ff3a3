"""The files in a model's folder that a start takes up where none is named.

A folder of GGUF files has several models, so a file that lies there may be another one's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.artifacts.policy_artifacts import POLICY_ARTIFACTS
from greenroom.core.artifacts.residual_file import ResidualFile
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.model_profile import PROFILE_FILE, load_model_profile
from greenroom.moe.routing.residual_maps import check_fits
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.fidelity import check_profile
from greenroom.policies.registry import EXPERT_POLICIES, artifact_kinds, policy_class, runs_routers_ahead
from greenroom.worker.model.config import WorkerConfig

log = logging.getLogger(__name__)

RESIDUAL: Final = ResidualFile.KIND
_WITHOUT_PROFILE: Final = "the model goes without a profile"
_WITHOUT_RESIDUAL: Final = "routers are run ahead as they are"


def files_beside(
    folder: Path, policy: str, options: Mapping[str, Any], given: Collection[str], *, batching: str = "fcfs"
) -> dict[str, Path]:
    """By their name in WorkerConfig: the profile, and what ``policy`` and the batch policy predict by. ``given``: names
    that are settled.

    What can not be used is passed over, and the log says so. A policy that is not known predicts by nothing: it is
    refused elsewhere.
    """
    found = (
        {} if "profile" in given else _usable(folder / PROFILE_FILE, "profile", load_model_profile, _WITHOUT_PROFILE)
    )
    if policy not in EXPERT_POLICIES:
        return found
    try:
        taken = artifact_kinds(policy, options, batching)
    except (UnknownName, InvalidConfig):
        taken = policy_class(policy, options).artifacts
    for kind, said in POLICY_ARTIFACTS.items():
        if kind in taken and kind not in given:
            path = folder / f"{kind}.safetensors"
            if path.is_file():
                found |= _usable(path, kind, ARTIFACT_FILES[kind].read, said.without)
            elif not said.refused:  # else by a message that says what makes one
                say = log.warning if said.needed else log.info
                say("%s: there is no %s, and no --%s. `%s` makes one, and so does a predictor service, of live traces",
                    said.without, path, kind.replace("_", "-"), said.made_by)  # fmt: skip
    if RESIDUAL not in given and runs_routers_ahead(policy, options):
        found |= _usable(folder / f"{RESIDUAL}.safetensors", RESIDUAL, ResidualFile.read, _WITHOUT_RESIDUAL)
    return found


def _usable(path: Path, name: str, read: Callable[[Path], object], without: str) -> dict[str, Path]:
    if not path.is_file():
        return {}
    try:
        read(path)
    except InvalidConfig as error:
        log.warning("%s: the file in the model's folder can not be used: %s", without, error)
        return {}
    return {name: path}


def without_others(config: WorkerConfig, catalogue: Catalogue, *, hidden: int, model: str) -> WorkerConfig:
    """``config`` without those files of ``found_beside`` that are of a model of another shape; the log says so.

    ``hidden``: the width of the model's rows. Raises InvalidConfig where the model can not go without one.
    """
    passed_over: dict[str, Any] = {}
    for name in sorted(config.found_beside):
        path = getattr(config, name)
        try:
            if name == "profile":
                check_profile(load_model_profile(path), catalogue, model)
            elif name == RESIDUAL:
                check_fits(ResidualFile.read(path), str(path), tuple(catalogue.experts_per_layer.tolist()), hidden)
            else:
                artifact_of(catalogue, ARTIFACT_FILES[name].read(path), str(path))
        except InvalidConfig as error:
            without = {"profile": _WITHOUT_PROFILE, RESIDUAL: _WITHOUT_RESIDUAL}
            said = without[name] if name in without else POLICY_ARTIFACTS[name].without
            log.warning("%s: %s lies in the model's folder, and is another model's: %s", said, path, error)
            passed_over[name] = None
    return replace(config, **passed_over, found_beside=config.found_beside.difference(passed_over))
