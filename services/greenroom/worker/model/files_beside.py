"""The files in a model's folder that a start takes up where none is named.

Imports no torch: settings are refused before that is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.artifacts.policy_artifacts import POLICY_ARTIFACTS
from greenroom.core.artifacts.residual_file import ResidualFile
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.model_profile import PROFILE_FILE, load_model_profile
from greenroom.policies.registry import EXPERT_POLICIES, artifact_kinds, policy_class, runs_routers_ahead

log = logging.getLogger(__name__)

RESIDUAL: Final = ResidualFile.KIND
WITHOUT_PROFILE: Final = "the model goes without a profile"
WITHOUT_RESIDUAL: Final = "routers are run ahead as they are"


def files_beside(
    folder: Path, policy: str, options: Mapping[str, Any], given: Collection[str], *, batching: str = "fcfs"
) -> dict[str, Path]:
    """By their name in WorkerConfig: the profile, and what ``policy`` and the batch policy predict by. ``given``: names
    that are settled.

    What can not be used is passed over, and the log says so. A policy that is not known predicts by nothing: it is
    refused elsewhere.
    """
    found = {} if "profile" in given else _usable(folder / PROFILE_FILE, "profile", load_model_profile, WITHOUT_PROFILE)
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
        found |= _usable(folder / f"{RESIDUAL}.safetensors", RESIDUAL, ResidualFile.read, WITHOUT_RESIDUAL)
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
