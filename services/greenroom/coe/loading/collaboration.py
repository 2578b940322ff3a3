"""A definition with its experts' checkpoints. Without torch: everything that can be wrong is found before that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import huggingface_hub

from greenroom.checkpoints.weight_files import weight_names
from greenroom.coe.graph.definition_file import (
    CoeDefinition,
    ExpertDefinition,
    check_labels,
    followers_of,
    read_definition,
)
from greenroom.coe.graph.expert_graph import ExpertGraph
from greenroom.coe.loading.expert_checkpoint import ExpertCheckpoint, Task, read_expert
from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, UnsupportedModel
from greenroom.text.hub import SMALL_FILES, download

POOLING: Final = "*_Pooling/config.json"
"""How texts' embeddings are made, in checkpoints of sentence-transformers."""


@dataclass(frozen=True, slots=True)
class Collaboration:
    """``file``: where the definition was read. ``experts[N]``: numbered as in ``graph``."""

    file: Path
    definition: CoeDefinition
    graph: ExpertGraph
    experts: tuple[ExpertCheckpoint, ...]

    @property
    def name(self) -> str:
        return self.definition.name

    def of_architecture(self) -> dict[str, list[int]]:
        """By each architecture, in the order of the file, the experts that have it."""
        found: dict[str, list[int]] = {}
        for key, expert in enumerate(self.experts):
            found.setdefault(expert.architecture, []).append(key)
        return found


def read_collaboration(file: Path, *, offline: bool = False, hub_cache: Path | None = None) -> Collaboration:
    """The definition in ``file`` and the checkpoints that it names: folders beside it, or repositories of the hub.

    ``offline``: of the hub use only what is cached. ``hub_cache``: None is the hub's default. Raises InvalidConfig,
    UnsupportedModel or CorruptCheckpoint, which name the file and the expert.
    """
    definition = read_definition(file)
    experts = tuple(_read(file, name, expert, offline, hub_cache) for name, expert in definition.experts.items())
    labels = {
        name: expert.labels
        for name, expert in zip(definition.experts, experts, strict=True)
        if expert.task is not Task.EMBEDDING
    }
    check_labels(definition, labels, str(file))
    _check_inputs(file, definition, experts)
    return Collaboration(file, definition, ExpertGraph(definition), experts)


def _read(
    file: Path, name: str, definition: ExpertDefinition, offline: bool, hub_cache: Path | None
) -> ExpertCheckpoint:
    where = f"{file}: experts.{name}"
    try:
        folder = _folder(file.parent, definition, offline, hub_cache)
        return read_expert(folder, definition.model)
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}.{error.field}", error.value, error.allowed) from None
    except (CorruptCheckpoint, UnsupportedModel) as error:
        raise type(error)(f"{where}: {error}") from error


def _folder(beside: Path, definition: ExpertDefinition, offline: bool, hub_cache: Path | None) -> Path:
    """Where the expert's files are, downloaded as far as they are needed. Raises InvalidConfig."""
    model, revision = definition.model, definition.revision
    own = beside / Path(model).expanduser()
    if own.is_dir():
        if revision is not None:
            raise InvalidConfig("revision", revision, f"{model} is a folder; only hub repositories have revisions")
        return own
    if revision is None:
        raise InvalidConfig("model", model, f"there is no folder {own}; a hub id needs a `revision` beside it")
    offline = offline or huggingface_hub.is_offline_mode()
    folder = download(model, revision, offline, hub_cache, SMALL_FILES)
    commit = folder.name  # the same for all its files, even after a push
    download(model, commit, offline, hub_cache, [POOLING], ignored=())
    return download(model, commit, offline, hub_cache, weight_names(folder, model))


def _check_inputs(file: Path, definition: CoeDefinition, experts: Sequence[ExpertCheckpoint]) -> None:
    """Every expert of a request gets the same input. Raises InvalidConfig."""
    takes = dict(zip(definition.experts, (expert.takes for expert in experts), strict=True))
    for name, followers in followers_of(definition).items():
        for follower in followers:
            if takes[follower] is not takes[name]:
                raise InvalidConfig(
                    f"{file}: experts.{name}",
                    f"an {takes[name]} for it, then a {takes[follower]} for {follower!r}",
                    "all experts of a request get the same input",
                )
