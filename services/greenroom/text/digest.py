"""A digest of all files that decide how text becomes tokens: gateways and workers must have the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from greenroom.text.files import (
    CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TOKENIZER_FILE,
)


def text_digest(folder: Path) -> str:
    """Of the tokenizer's and the chat templates' files in a checkpoint's folder, by name and content."""
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
