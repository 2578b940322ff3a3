"""A model's folder: one of this machine, or downloaded from the hub as far as it is needed."""

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
    """The folder ``model`` or, failing that, where the files of the hub's repository of that id lie that match
    ``patterns``.

    Raises InvalidConfig, naming the field, where there is no such model.
    """
    folder = local_folder(model, revision)
    if folder is not None:
        return folder
    return download(model, revision, offline or huggingface_hub.is_offline_mode(), cache_dir, patterns)


def local_folder(model: str, revision: str | None) -> Path | None:
    """None for what can only be a repository's id. Raises InvalidConfig."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise InvalidConfig("revision", revision, f"{model} is a folder; only hub repositories have revisions")
        return folder
    if _looks_like_path(model):
        raise InvalidConfig("model", model, "there is no such folder")
    return None


def hub_id(model: str | None) -> str | None:
    """``model`` where it is a repository's id, None where it is a folder. Raises InvalidConfig as ``local_folder``."""
    return None if model is None or local_folder(model, None) is not None else model


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
