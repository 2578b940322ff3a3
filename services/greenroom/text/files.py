"""What a checkpoint's folder says about its text: tokenizer.json, tokenizer_config.json and their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.core.files import lfs_hint

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_VOCABULARIES_TO_CONVERT = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text before the tokenizer's own model sees it."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True)
class TextFiles:
    """``named``: bos_token and its like. ``added``: those that tokenizer.json may lack, in the order of their ids."""

    tokenizer: bytes
    named: Mapping[str, str]
    added: tuple[AddedToken, ...]
    templates: Mapping[str, str]


def read_text_files(folder: Path) -> TextFiles:
    """What ``folder`` holds. Raises UnsupportedModel where there is only a vocabulary that has to be converted
    first, CorruptCheckpoint where a file is missing, unreadable or not what it should be."""
    config = _read_object(folder / CONFIG_FILE)
    if "added_tokens_decoder" not in config:
        config = {**config, **_read_object(folder / SPECIAL_TOKENS_FILE)}
    extra = config.get("extra_special_tokens")
    by_name = {key: config.get(key) for key in NAMED_TOKENS}
    by_name |= {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    by_name |= extra if isinstance(extra, dict) else {}
    named = {key: token.content for key, value in by_name.items() if (token := _token(value, folder)) is not None}
    return TextFiles(_read_tokenizer(folder), named, _added(config, named.values(), folder), _templates(config, folder))


def _read_tokenizer(folder: Path) -> bytes:
    path = folder / TOKENIZER_FILE
    try:
        if hint := lfs_hint(path):
            raise CorruptCheckpoint(f"{path} is no tokenizer{hint}")
        return path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CorruptCheckpoint(f"{path} can not be read: {error.strerror or error}") from error
    found = [name for name in _VOCABULARIES_TO_CONVERT if (folder / name).exists()]
    if not found:
        raise CorruptCheckpoint(f"{folder} has no {TOKENIZER_FILE}; copy it from the place that the model came from")
    raise UnsupportedModel(
        f"{folder} has {', '.join(found)} but no {TOKENIZER_FILE}, the only tokenizer format that is read; convert it "
        'once, where transformers and sentencepiece are installed: python -c "from transformers import AutoTokenizer; '
        f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, empty where there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} can not be read as a JSON object: {error}") from error


def _token(value: object, folder: Path) -> AddedToken | None:
    if value is None:
        return None
    if isinstance(value, str):
        return AddedToken(value)
    if isinstance(value, dict) and isinstance(content := value.get("content"), str):
        flags = {key: bool(value[key]) for key in ("special", "lstrip", "rstrip", "single_word") if key in value}
        special = flags.get("special", True)
        return AddedToken(content, normalized=bool(value.get("normalized", not special)), **flags)
    raise CorruptCheckpoint(f"{folder / CONFIG_FILE}: a token is neither a string nor has it a content: {value!r:.80}")


def _added(config: Mapping[str, Any], named: Iterable[str], folder: Path) -> tuple[AddedToken, ...]:
    try:
        by_id = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    except (AttributeError, ValueError) as error:
        raise CorruptCheckpoint(f"{folder / CONFIG_FILE}: added_tokens_decoder is no map from ids to tokens") from error
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    if isinstance(extra, str) or not isinstance(extra, list | tuple | dict):
        raise CorruptCheckpoint(f"{folder / CONFIG_FILE}: extra_special_tokens is no list of tokens")
    values = [value for _, value in by_id]
    values += [config.get(key) for key in NAMED_TOKENS]
    values += [value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)]
    values += list(extra.values() if isinstance(extra, dict) else extra)
    tokens: dict[str, AddedToken] = {}
    for value in values:
        if (token := _token(value, folder)) is not None:
            tokens.setdefault(token.content, token)
    for content in named:
        tokens[content] = replace(tokens[content], special=True)
    return tuple(tokens.values())


def _templates(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Chat templates by name; the files of their own go before what tokenizer_config.json says."""
    paths = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).exists():
        paths["default"] = folder / TEMPLATE_FILE
    try:
        if paths:
            return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"a chat template in {folder} can not be read: {error}") from error
    match config.get("chat_template"):
        case None:
            return {}
        case str() as template:
            return {"default": template}
        case list() as named if all(_is_named(item) for item in named):
            return {item["name"]: item["template"] for item in named}
        case dict() as by_name if all(isinstance(template, str) for template in by_name.values()):
            return by_name
        case _:
            raise CorruptCheckpoint(
                f"{folder / CONFIG_FILE}: chat_template is neither a string nor a list of named ones"
            )


def _is_named(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
