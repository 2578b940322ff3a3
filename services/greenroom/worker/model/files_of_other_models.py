"""Files beside a model that are another one's: a folder of GGUF files has several models."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.artifacts.policy_artifacts import POLICY_ARTIFACTS
from greenroom.core.artifacts.residual_file import ResidualFile
from greenroom.core.errors import InvalidConfig
from greenroom.core.model_profile import load_model_profile
from greenroom.moe.routing.residual_maps import check_fits
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.fidelity import check_profile
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.files_beside import RESIDUAL, WITHOUT_PROFILE, WITHOUT_RESIDUAL

log = logging.getLogger(__name__)


def without_others(config: WorkerConfig, catalogue: Catalogue, *, hidden: int, model: str) -> WorkerConfig:
    """``config`` without those files of ``found_beside`` that are of a model of another shape; the log says so.

    ``hidden``: the width of the model's rows. Raises InvalidConfig where the model can not go without one.
    """
    passed_over: dict[str, Any] = {}
    for name in sorted(config.found_beside):
        path = getattr(config, name)
        if path is None:  # taken back since it was found
            continue
        try:
            if name == "profile":
                check_profile(load_model_profile(path), catalogue, model)
            elif name == RESIDUAL:
                check_fits(ResidualFile.read(path), str(path), tuple(catalogue.experts_per_layer.tolist()), hidden)
            else:
                artifact_of(catalogue, ARTIFACT_FILES[name].read(path), str(path))
        except InvalidConfig as error:
            without = {"profile": WITHOUT_PROFILE, RESIDUAL: WITHOUT_RESIDUAL}
            said = without[name] if name in without else POLICY_ARTIFACTS[name].without
            log.warning("%s: %s lies in the model's folder, and is another model's: %s", said, path, error)
            passed_over[name] = None
    return replace(config, **passed_over, found_beside=config.found_beside.difference(passed_over))
