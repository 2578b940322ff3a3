"""Prompts from files, for every command that takes some."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import click


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file: a text, or a conversation. ``task`` and ``name`` where the line says so."""

    content: str | tuple[dict[str, str], ...]
    task: str | None = None
    name: str | None = None

    def conversation(self, system: str | None = None) -> list[dict[str, str]]:
        """As messages, behind a system message if one is given."""
        head = [{"role": "system", "content": system}] if system is not None else []
        body = [{"role": "user", "content": self.content}] if isinstance(self.content, str) else list(self.content)
        return [*head, *body]

    def text(self) -> str:
        """As text to be completed. Raises click.UsageError for a conversation."""
        if isinstance(self.content, str):
            return self.content
        raise click.UsageError("a conversation (`messages`) needs the model's chat template")

    @property
    def last(self) -> str:
        """What was said last."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


def read_prompts(file: Path | None) -> list[Prompt]:
    """The prompts of a file (None or ``-``: of stdin), one a line; empty lines are skipped.

    A line is a text, a JSON string, or a JSON object with ``prompt`` or ``messages`` and, if it is to be known,
    ``task`` (or ``task_type``) and ``id``. Raises click.UsageError, naming the line.
    """
    if file is None or str(file) == "-":
        text = sys.stdin.read()
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise click.UsageError(f"{file} is no text in UTF-8: {error}") from error
    # Not splitlines(): JSON strings may hold other line separators, such as U+0085 and U+2028, as they are.
    return [_prompt(line, number) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _prompt(line: str, number: int) -> Prompt:
    start = line.lstrip()[:1]
    if start == '"':
        try:
            text = json.loads(line)
        except ValueError:
            return Prompt(line)  # a text that begins with a quotation
        return Prompt(text if isinstance(text, str) else line)
    if start != "{":
        return Prompt(line)
    try:
        fields = json.loads(line)
    except ValueError:
        fields = {}
    if not isinstance(fields, dict) or not fields.keys() & {"prompt", "messages"}:
        raise click.UsageError(f"line {number} is no JSON object with a field `prompt` or `messages`")
    task, name = fields.get("task", fields.get("task_type")), fields.get("id")
    if task is not None and not isinstance(task, str):
        raise click.UsageError(f"line {number}: `task` is no string")
    content = fields["prompt"] if "prompt" in fields else _messages(fields["messages"], number)
    if not isinstance(content, str | tuple):
        raise click.UsageError(f"line {number}: `prompt` is no string")
    return Prompt(content, task, None if name is None else str(name))


def _messages(messages: object, number: int) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise click.UsageError(f"line {number}: `messages` is no list of messages")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise click.UsageError(f"line {number}: a message has a `role` and a `content`, both strings")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
