"""A body's prompts as token ids, and the words that a task type is found from."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import ServedModel
from greenroom.gateway.config import GatewayConfig
from greenroom.text import Tokenizer

MAX_WORDS = 4096
"""How many characters of a prompt the task type is found from."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``words``: its text, which a task type is found from; None: the decoded ids."""

    ids: tuple[int, ...]
    behind_text: bool
    words: str | None


def prompts_of(prompt: str | list[int | str | list[int]]) -> list[str] | list[list[int]]:
    """Every form of OpenAI's ``prompt`` as a list of texts or of token ids. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    lists = [item for item in prompt if isinstance(item, list)]
    if not prompt or len(prompt) not in (len(texts), len(ids), len(lists)):
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids, and not "
            "empty",
            param="prompt",
        )
    return texts or lists or [ids]


def encoded(
    prompt: str, tokenizer: Tokenizer, model: ServedModel, config: GatewayConfig, field: str, *, special: bool
) -> tuple[int, ...]:
    """The prompt's token ids. Raises InvalidRequest for a prompt that is certainly too long, before encoding it."""
    fewest = tokenizer.fewest_tokens(prompt)
    if config.max_prompt_tokens is not None and fewest > config.max_prompt_tokens:
        raise InvalidRequest(
            f"the {field} has {fewest} tokens or more; at most {config.max_prompt_tokens} are allowed here",
            param=field,
            code="token_limit_exceeded",
        )
    if fewest > model.max_model_len:
        raise InvalidRequest(
            f"this model's maximum context length is {model.max_model_len} tokens, but the {field} has {fewest} or "
            f"more; shorten the {field}",
            param=field,
            code="context_length_exceeded",
        )
    return tuple(tokenizer.encode(prompt, add_special_tokens=special))


def words_of(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """The two ends of the prompt: the task stands at one of them."""
    words = prompt.words
    if words is None:
        ids = prompt.ids
        words = tokenizer.decode(ids if len(ids) <= MAX_WORDS else ids[: MAX_WORDS // 2] + ids[-(MAX_WORDS // 2) :])
    if len(words) <= MAX_WORDS:
        return words
    return f"{words[: MAX_WORDS // 2]}\n{words[-(MAX_WORDS // 2) :]}"
