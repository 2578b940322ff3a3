"""Chat templates: Jinja from the checkpoint, rendered as transformers renders them, in a sandbox that has bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace

from greenroom.core.errors import CorruptCheckpoint, InvalidRequest
from greenroom.text.template_limits import BoundedEnvironment, bounded, rendered

_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_MARK = "GREENROOM-CONTINUES-HERE"


class ChatTemplate:
    """Renders messages to the text that the model was trained on.

    Equals ``apply_chat_template(…, tokenize=False)`` of transformers without documents: trimmed blocks,
    ``raise_exception``, ``strftime_now``, ``tojson`` that leaves HTML alone, ``{% generation %}``, loop controls.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: ``bos_token`` and its like, given to the template. Raises CorruptCheckpoint for a
        template that does not compile."""
        try:
            tree = _ENVIRONMENT.parse(source)
            self._template = bounded(_ENVIRONMENT, _ENVIRONMENT.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise CorruptCheckpoint(f"the model's chat template is not valid Jinja: {error}") from error
        self._source = source
        self._special_tokens = dict(special_tokens)
        self.variables = (
            frozenset(jinja2.meta.find_undeclared_variables(tree))
            - _GIVEN
            - frozenset(self._special_tokens)
            - frozenset(_ENVIRONMENT.globals)
        )
        """The names that the template reads beside the messages: what a caller can set."""
        self.reads_tools = "tools" in jinja2.meta.find_undeclared_variables(tree)

    def mentions(self, word: str) -> bool:
        """Whether ``word`` stands anywhere in the template's source."""
        return word in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text. ``tools``: what the model is told of tools. ``continue_final_message`` leaves the last
        message open, to be continued.

        Values in messages must be plain JSON ones; keys whose value is None are dropped. Raises InvalidRequest where
        the template refuses the messages, naming what it says, or fails on them.
        """
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if continue_final_message:
            chat[-1] = {**chat[-1], "content": str(chat[-1].get("content", "")) + _MARK + " "}
        try:
            given = {
                "messages": chat,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            text = rendered(self._template, {**self._special_tokens, **(variables or {}), **given})
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses this: {error}", param="messages") from error
        except Exception as error:  # a template can fail in any way that Python can
            raise InvalidRequest(f"the model's chat template fails on this: {error}", param="messages") from error
        return _cut_at_mark(text) if continue_final_message else text


def _cut_at_mark(text: str) -> str:
    cut = text.rfind(_MARK)
    if cut < 0:
        raise InvalidRequest(
            "the model's chat template leaves out the final message, so it can not be continued",
            param="continue_final_message",
        )
    trims = not text.startswith(_MARK + " ", cut)
    return text[:cut].rstrip() if trims else text[:cut]


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the assistant said, for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _NamespaceWithoutPrivates(Namespace):
    """A template's namespace that takes no name by which Python's internals could be reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name with a leading underscore, as {name!r}")


class _DictOnly:
    """What ``dict`` is to a template: it makes dictionaries, and has no attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_DictOnly(),
        namespace=_NamespaceWithoutPrivates,
    )
    return environment


_ENVIRONMENT = _environment()
