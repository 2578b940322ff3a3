"""Loads torch's compiler only when something uses it. For greenroom's own processes.

transformers' model classes mention ``torch._dynamo`` in decorators, and so do a few functions of torch itself. Each
mention imports the compiler with Inductor, sympy and Triton. That takes 0.2 GB and three seconds in processes that
never compile. ``compiler_on_demand`` replaces the module by one that provides those decorators and nothing else. Any
other use of it, or of a module below it, loads the real one first.

The command line calls it before any command runs, so it imports nothing itself. Importing greenroom as a library does
not run it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
_INDEXING: Final = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""transformers' masks import one class of it, for masks that are made by ``vmap``."""

_NOT_HERE: Final = ("is_torch_distributed_available", "is_torch_flex_attn_available")
"""Checks by which transformers decides what its modules import. Both features import sympy, and neither is used here: a
worker is one process, and the batch loop has its own attention.
"""
_ASKED: Final = ("transformers.utils.import_utils", "transformers.utils")


def compiler_on_demand() -> None:
    """From now on this process loads torch's compiler when it is used, not when it is mentioned.

    transformers then also leaves out its modules for several processes and for flex attention. To be called before
    transformers' models are imported. Does nothing once the compiler is loaded.
    """
    if _COMPILER in sys.modules:
        return
    sys.modules[_COMPILER] = _Compiler()
    sys.modules[_INDEXING] = _Indexing(_INDEXING)
    sys.meta_path[:0] = [_PartsOfTheCompiler(), answers := _Answers()]
    answers.give()


def _no() -> bool:
    return False


class _Compiler(ModuleType):
    """Stands in for ``torch._dynamo``. Its three functions are the decorators that modules use when they are imported.

    They have no effect without the compiler. Their calls are passed on when it is loaded.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__: list[str] = []  # a package; its modules are found by _PartsOfTheCompiler
        self._marks: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_COMPILER!r} has no attribute {name!r}")
        return getattr(_load(), name)

    def allow_in_graph(self, function: Any) -> Any:
        return self._marked("allow_in_graph", function)

    def assume_constant_result(self, function: Any) -> Any:
        return self._marked("assume_constant_result", function)

    def _marked(self, by: str, function: Any) -> Any:
        if not isinstance(function, FunctionType) or sys.modules.get(_COMPILER) is not self:
            return getattr(_load(), by)(function)
        self._marks.append((by, function))
        return function

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        if function is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        if not isinstance(function, FunctionType):
            return _load().disable(function, recursive, **options)
        return _disabled(function, lambda: _load().disable(function, recursive, **options))

    def hand_over(self, real: Any) -> None:
        marks, self._marks = self._marks, []
        for by, function in marks:
            getattr(real, by)(function)


def _disabled(function: Callable[..., Any], disable: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """``function`` until the compiler is loaded, and then the result of ``disable`` for it."""
    real: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal real
        if real is None:
            if type(sys.modules.get(_COMPILER)) is _Compiler:
                return function(*args, **kwargs)
            real = disable()
        return real(*args, **kwargs)

    return call


class _Indexing(ModuleType):
    """Stands in for the module with ``TransformGetItemToIndex``."""

    @staticmethod
    def TransformGetItemToIndex() -> Any:
        return _load_part(_INDEXING).TransformGetItemToIndex()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_INDEXING!r} has no attribute {name!r}")
        return getattr(_load_part(_INDEXING), name)


def _load() -> Any:
    """The real compiler. Threads that ask at once wait for each other in the import."""
    stand_in = sys.modules.get(_COMPILER)
    if isinstance(stand_in, _Compiler):
        sys.modules.pop(_INDEXING, None)
        sys.modules.pop(_COMPILER, None)
        real = importlib.import_module(_COMPILER)
        stand_in.hand_over(real)
        return real
    return importlib.import_module(_COMPILER)


def _load_part(name: str) -> Any:
    _load()
    return importlib.import_module(name)


class _PartsOfTheCompiler(MetaPathFinder):
    """Treats an import of a module below the stand-in as a use of the compiler."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_COMPILER}.") or path:  # the real package has a path, the stand-in an empty one
            return None
        return ModuleSpec(fullname, _AlreadyThere(_load_part(fullname)))


class _AlreadyThere(Loader):
    """Returns a module that has already been imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Answers(MetaPathFinder):
    """Replaces the checks once transformers' module with them is imported, before another module uses them.

    As a finder it finds nothing; it only watches what is imported. If transformers drops one of the checks, that costs
    memory and breaks nothing.
    """

    def __init__(self) -> None:
        self._given = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._given and fullname.startswith("transformers."):
            self.give()
        return None

    def give(self) -> None:
        """If the module is imported by now."""
        modules = [sys.modules.get(name) for name in _ASKED]
        for question in _NOT_HERE:
            for module in modules:
                if not hasattr(module, question):
                    return
        for question in _NOT_HERE:
            for module in modules:
                setattr(module, question, _no)
        self._given = True
