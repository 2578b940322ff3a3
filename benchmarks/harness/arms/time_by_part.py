"""Where the time of a turn goes, by part. Wrappers are put around methods of the model and the engine, and removed.

A wrapper takes about half a microsecond a call, which counts to the part that it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness.part_clock import PartClock
from greenroom.llm import LLM
from greenroom.moe.architecture.moe_layers import experts_modules
from greenroom.moe.batch import batch_engine

PARTS = (
    "attention", "router", "experts", "other layers", "waiting", "bookkeeping", "look-ahead", "sampling", "loop"
)  # fmt: skip
"""``experts``: their products. ``other layers``: norms, embeddings, the head, masks, the forward's own code.
``waiting``: for transfers that a layer needs now. ``bookkeeping``: all else within the engine and its policy.
``look-ahead``: the next layers' routers run early. ``loop``: the batch loop around, and the way to its thread.
"""

_SOURCE_METHODS = (
    "step", "layer_entered", "allowed_experts", "rerouted", "routed", "resident_addresses", "layer_ran", "take_request",
    "predicted",
)  # fmt: skip


class Inside:
    """Times all forwards of the LLM until ``remove``. Nothing must run when it is made or removed.

    Raises AttributeError for a method that no longer exists: its time would count to the wrong part.
    """

    def __init__(self, llm: LLM) -> None:
        self._clock = PartClock()
        self._undo: list[Callable[[], None]] = []
        engine, source = llm.worker.loop.engine, llm.worker.experts
        model = engine.model.model
        experts = {id(module) for _, module in experts_modules(model)}
        routers = {id(module) for module in _routers(model)}
        try:
            self._time(engine, "step", "loop")
            self._time(engine.model, "forward", "other layers")
            self._time(batch_engine, "_sample", "sampling")
            self._time(source._tiers, "wait", "waiting")
            for name in _SOURCE_METHODS:
                self._time_source(source, name)
            hooks = _model_hooks(model)
            if hooks.look_ahead is not None:
                self._replace(hooks, "look_ahead", _TimedLookAhead(hooks.look_ahead, self._clock))
            if engine.model.lean is not None:  # then the modules' own attention is not what runs
                self._time(engine.model.lean, "attention", "attention")
                for block in filter(None, (layer.block for layer in engine.model.lean._layers)):
                    self._time(block, "route", "router")
                    self._time(block, "experts", "experts")
            for module in model.modules():
                if id(module) in experts:
                    self._time(module, "forward", "experts")
                elif id(module) in routers:
                    self._time(module, "forward", "router")
                elif type(module).__name__.endswith("Attention"):
                    self._time(module, "forward", "attention")
        except BaseException:
            self.remove()
            raise

    def seconds(self, total: float) -> dict[str, float]:
        """By part; ``total`` seconds of the turn, of which what no part took is the loop's."""
        parts = {part: self._clock.seconds.get(part, 0.0) for part in PARTS}
        parts["loop"] += max(0.0, total - sum(parts.values()))
        return parts

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _time(self, holder: Any, name: str, part: str) -> None:
        inner, clock = getattr(holder, name), self._clock

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.enter(part)
            try:
                return inner(*args, **kwargs)
            finally:
                clock.leave()

        self._replace(holder, name, timed)

    def _time_source(self, source: Any, name: str) -> None:
        """As ``_time``, for bookkeeping. It times both ends of a context manager, and every turn of an iterator."""
        inner, clock = getattr(source, name), self._clock

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.enter("bookkeeping")
            try:
                made = inner(*args, **kwargs)
            finally:
                clock.leave()
            return _TimedContext(made, clock) if hasattr(made, "__enter__") else made

        self._replace(source, name, timed)

    def _replace(self, holder: Any, name: str, value: Any) -> None:
        own = vars(holder).get(name, self)  # self: there was none, the class's own was seen through it

        def undo() -> None:
            if own is self:
                delattr(holder, name)
            else:
                setattr(holder, name, own)

        setattr(holder, name, value)
        self._undo.append(undo)


class _TimedLookAhead:
    def __init__(self, inner: Any, clock: PartClock) -> None:
        self._inner = inner
        self._clock = clock

    def __call__(self, *args: Any) -> None:
        with self._clock.part("look-ahead"):
            self._inner(*args)

    def answer(self) -> None:
        with self._clock.part("look-ahead"):
            self._inner.answer()


class _TimedContext:
    def __init__(self, inner: Any, clock: PartClock) -> None:
        self._inner = inner
        self._clock = clock

    def __enter__(self) -> Any:
        with self._clock.part("bookkeeping"):
            entered = self._inner.__enter__()
        return _timed_iterator(entered, self._clock) if hasattr(entered, "__next__") else entered

    def __exit__(self, *error: Any) -> Any:
        with self._clock.part("bookkeeping"):
            return self._inner.__exit__(*error)


def _timed_iterator(inner: Iterator[Any], clock: PartClock) -> Iterator[Any]:
    while True:
        clock.enter("bookkeeping")
        try:
            item = next(inner)
        except StopIteration:
            return
        finally:
            clock.leave()
        yield item


def _routers(model: Any) -> list[Any]:
    """The module beside each layer's experts that is its router."""
    found = []
    for name, _ in experts_modules(model):
        block = model.get_submodule(name.rpartition(".")[0])
        found += [child for own, child in block.named_children() if own in ("gate", "router")]
    return found


def _model_hooks(model: Any) -> Any:
    from greenroom.moe.kernels.expert_hooks import hook_of

    _, module = next(iter(experts_modules(model)))
    return hook_of(module).model_hooks
