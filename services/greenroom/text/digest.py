"""A digest of all files that decide how text becomes tokens: gateways and workers must have the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from greenroom.text.files import (
    CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TOKENIZER_FILE,
)
from greenroom.text.model_text import text_files_of


def text_digest(place: Path) -> str:
    """Of the tokenizer's and the chat templates' files in a checkpoint's folder, by name and content; of a GGUF file,
    of what they would be. Raises as ``text_files_of`` for a GGUF file."""
    return _of_gguf(place) if place.is_file() else _of_folder(place)


def _of_gguf(path: Path) -> str:
    files = text_files_of(path)
    parts = [files.tokenizer, msgspec.json.encode([files.named, files.added, files.templates])]
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(f"{len(part)}\n".encode())
        whole.update(part)
    return whole.hexdigest()


def _of_folder(folder: Path) -> str:
    names = [TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE]
    names += sorted(f"{TEMPLATE_FOLDER}/{path.name}" for path in (folder / TEMPLATE_FOLDER).glob("*.jinja"))
    whole = hashlib.blake2b(digest_size=16)
    for name in names:
        path = folder / name
        if path.is_file():
            content = path.read_bytes()
            whole.update(f"{name} {len(content)}\n".encode())
            whole.update(content)
    return whole.hexdigest()
