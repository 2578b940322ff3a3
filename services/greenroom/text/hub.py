"""Where a model lies: in a folder or a GGUF file of this machine, or downloaded from the hub as far as it is needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from greenroom.core.errors import InvalidConfig
from greenroom.gguf.shards import SUFFIX

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Everything but the weights."""


def model_folder(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    patterns: Sequence[str] = SMALL_FILES,
) -> Path:
    """The folder or the GGUF file ``model`` or, failing that, where the files of the hub's repository of that id lie
    that match ``patterns``.

    Raises InvalidConfig, naming the field, where there is no such model.
    """
    own = local_model(model, revision)
    if own is not None:
        return own
    return download(model, revision, offline or huggingface_hub.is_offline_mode(), cache_dir, patterns)


def local_model(model: str, revision: str | None) -> Path | None:
    """The folder or the GGUF file of this machine. None for what can only be a repository's id. Raises
    InvalidConfig."""
    place = Path(model).expanduser()
    is_gguf = place.name.endswith(SUFFIX) and place.is_file()
    if place.is_dir() or is_gguf:
        if revision is not None:
            kind = "file" if is_gguf else "folder"
            raise InvalidConfig("revision", revision, f"{model} is a {kind}; only hub repositories have revisions")
        return place
    if place.is_file():
        raise InvalidConfig("model", model, f"it is a file, and no GGUF file by its name ({SUFFIX}): give a folder")
    if place.name.endswith(SUFFIX):
        raise InvalidConfig("model", model, "there is no such file")
    if _looks_like_path(model):
        raise InvalidConfig("model", model, "there is no such folder")
    return None


def local_folder(model: str, revision: str | None) -> Path | None:
    """The folder that the local model is or lies in, where files beside it are looked for. None and raises as
    ``local_model``."""
    place = local_model(model, revision)
    return place.parent if place is not None and place.is_file() else place


def hub_id(model: str | None) -> str | None:
    """``model`` where it is a repository's id, None where it is of this machine. Raises InvalidConfig as
    ``local_model``."""
    return None if model is None or local_model(model, None) is not None else model


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "~", os.sep)) or model.count("/") > 1 or "\\" in model or Path(model).exists()


def download(
    model: str,
    revision: str | None,
    offline: bool,
    cache_dir: Path | None,
    patterns: Sequence[str],
    ignored: Sequence[str] = ("*/*",),
) -> Path:
    """Where the files lie that match ``patterns`` and none of ``ignored``. By default they are of the repository's top
    level: other formats of the same weights lie in its folders. Raises InvalidConfig.
    """
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=offline,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
            )
        )
    except HFValidationError as error:
        raise InvalidConfig("model", model, f"neither a folder nor a repository id ({error})") from error
    except GatedRepoError as error:
        raise InvalidConfig("model", model, "its owner has to grant access: `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise InvalidConfig("revision", revision, f"{model} has no such branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise InvalidConfig("model", model, "there is no such folder, nor such a repository on the hub") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        why = "offline mode is on" if offline else f"the hub can not be reached ({error})"
        raise InvalidConfig("model", model, f"there is no such folder, it is not cached{at}, and {why}") from error
