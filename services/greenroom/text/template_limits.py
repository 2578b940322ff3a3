"""Bounds on what a chat template may take.

A template comes with the model's files, from anywhere, and a gateway runs it for each chat. One that does not end, or
asks for gigabytes, is to cost the request that meets it and no other.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S: Final = 1.0
"""Processor time of one rendering. A prompt of a hundred thousand tokens takes a tenth of it."""
MOST_CHARACTERS: Final = 2**24
"""Of a rendered text, and of what a template multiplies, adds or pads. Items of a list count as characters."""
_MOST_BITS: Final = 4096
"""Of a whole number that a template multiplies or raises to a power."""
_LONG_PERCENT: Final = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d{6,}|\*|\d*\.(?:\d{6,}|\*))")
"""A width or precision of six digits, or one that is taken from what is formatted (``%*d``)."""
_LONG_FIELD: Final = re.compile(r"\{[^{}]*:[^{}]*\d{6,}")


class TemplateTakesTooMuch(TemplateError):
    """A template does not end, or makes something too large."""


class _Clock(threading.local):
    """Of the rendering on this thread."""

    until = float("inf")


_clock = _Clock()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which what a template makes has bounds. Templates of ``bounded`` end as well."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("center", "indent"):
            self.filters[name] = _with_small_numbers(self.filters[name])
        self.filters["format"] = _formatted(self.filters["format"])
        self.filters["replace"] = _replaced(self.filters["replace"])
        self.filters["join"] = _with_short_items(self.filters["join"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _refuse_widths(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if operator != "+" and bits > _MOST_BITS:
                raise TemplateTakesTooMuch(f"it makes a number of {bits} bits")
        else:
            _refuse_long(_length_of(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Named as the base class has them, lest names that a template passes mean these.
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _refuse_large(args, kwargs)
            if __obj.__name__ == "replace" and len(args) > 1:
                _refuse_long(_length_replaced(text, *args[:2]))
            elif __obj.__name__ == "join" and args:
                args = (_short(args[0], text), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        own = super().wrap_str_format(value)
        if own is None:
            return None
        if _LONG_FIELD.search(value.__self__):
            raise TemplateTakesTooMuch(f"it formats by {value.__self__!r:.40}")
        return _with_small_numbers(own, of=0)

    def joined(self, *parts: Any) -> str:
        """What ``~`` makes."""
        texts = [str(part) for part in parts]
        _refuse_long(sum(map(len, texts)))
        return "".join(texts)

    def step(self) -> bool:
        """Raises TemplateTakesTooMuch once the rendering on this thread has had its time."""
        if time.thread_time() > _clock.until:
            raise TemplateTakesTooMuch(f"it did not end within {RENDER_S:g} s of processor time")
        return True


def bounded(environment: BoundedEnvironment, tree: nodes.Template) -> Template:
    """The template, with a look at the clock in each turn of a loop and in each call of a macro. Changes ``tree``.

    Straight code is bounded by its length: each of its expressions goes over sequences that are bounded.
    """
    for loop in tree.find_all(nodes.For):
        loop.body.insert(0, _step(loop.lineno))
        if loop.test is not None:
            loop.test = nodes.And(_call(loop.lineno), loop.test).set_lineno(loop.lineno)
    called: list[nodes.Macro | nodes.CallBlock] = [*tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
    for block in called:
        block.body.insert(0, _step(block.lineno))
    _Concatenations().visit(tree)
    tree.set_environment(environment)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None), None)


def rendered(template: Template, values: dict[str, Any]) -> str:
    """As ``template.render(values)``, with bounds of time and length. Raises TemplateTakesTooMuch."""
    pieces, length = [], 0
    _clock.until = time.thread_time() + RENDER_S
    try:
        for piece in template.generate(values):
            length += len(piece)
            if length > MOST_CHARACTERS:
                raise TemplateTakesTooMuch(f"it makes more than {MOST_CHARACTERS} characters")
            pieces.append(piece)
    finally:
        _clock.until = float("inf")
    return "".join(pieces)


class _Concatenations(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _call(node.lineno, "joined", node.nodes)


def _call(line: int, name: str = "step", args: list[nodes.Expr] | None = None) -> nodes.Expr:
    """Of a method of the environment."""
    called = nodes.Call(nodes.EnvironmentAttribute(name), args or [], [], None, None)
    called.set_lineno(line)
    return called


def _step(line: int) -> nodes.Node:
    return nodes.ExprStmt(_call(line)).set_lineno(line)


def _length_of(operator: str, left: Any, right: Any) -> int:
    """Of what a binary operation on sequences makes; 0 where it makes none."""
    lengths = [len(of) if isinstance(of, str | bytes | list | tuple) else None for of in (left, right)]
    if operator == "+":
        return sum(length or 0 for length in lengths)
    if operator == "*":
        for length, times in zip(lengths, (right, left), strict=True):
            if length is not None and isinstance(times, int):
                return length * max(times, 0)
    return 0


def _length_replaced(text: str, old: Any, new: Any) -> int:
    """The most that a text's ``replace`` makes."""
    return len(text) + text.count(old) * len(new) if isinstance(old, str) and isinstance(new, str) else 0


def _short(items: Iterable[Any], between: str) -> list[Any]:
    """The items, which may be made one by one, if they are not too long to be joined."""
    found, length = [], 0
    for item in items:
        length += len(between) + (len(item) if isinstance(item, str) else 1)
        _refuse_long(length)
        found.append(item)
    return found


def _refuse_long(length: int) -> None:
    if length > MOST_CHARACTERS:
        raise TemplateTakesTooMuch(f"it makes something of length {length}")


def _refuse_large(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A number that a text is padded by."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MOST_CHARACTERS:
            raise TemplateTakesTooMuch("it pads a text by more than there may be")


def _refuse_widths(form: Any) -> None:
    if isinstance(form, str) and _LONG_PERCENT.search(form):
        raise TemplateTakesTooMuch(f"it formats by {form!r:.40}")


def _with_small_numbers(own: Callable[..., Any], *, of: int = 1) -> Callable[..., Any]:
    """``of``: the first argument that may be such a number."""

    @functools.wraps(own)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _refuse_large(args[of:], kwargs)
        return own(*args, **kwargs)

    return guarded


def _formatted(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def guarded(form: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_widths(form)
        return own(form, *args, **kwargs)

    return guarded


def _replaced(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def guarded(context: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_long(_length_replaced(str(text), *(*args, *kwargs.values(), None, None)[:2]))
        return own(context, text, *args, **kwargs)

    return guarded


def _with_short_items(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def guarded(context: Any, items: Any, *args: Any, **kwargs: Any) -> Any:
        between = str(args[0] if args else kwargs.get("d", ""))
        return own(context, _short(items, between), *args, **kwargs)

    return guarded
