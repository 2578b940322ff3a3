"""An architecture: transformers' own model of one expert, from which the values of its weights were taken out.

The model is made by transformers' own loading, so whatever it does to names, types and ties happens here as well. Its
parameters and buffers then go to the meta device. The expert's record holds their values: each tensor of the state dict
once, whatever number of names it has. Buffers that no checkpoint holds stay as they were made.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transformers
import xxhash
from transformers import CONFIG_MAPPING, AutoConfig

from greenroom.checkpoints.read_ahead import ReadAhead
from greenroom.checkpoints.shard_reader import ShardReader, typed
from greenroom.coe.loading.collaboration import Collaboration
from greenroom.coe.loading.expert_checkpoint import ExpertCheckpoint
from greenroom.core.errors import CorruptCheckpoint, GreenroomError, InvalidConfig, UnsupportedModel
from greenroom.experts.pack.layout import DTYPES, FLOATS, PIECE_BYTES, RecordLayout

_NOT_COMPUTED_WITH: Final = re.compile(r"\.num_batches_tracked$")
"""Counters of training, which old checkpoints lack."""

AUTO: Final = "auto"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    """``key``: that of its experts' checkpoints. ``dtype``: of its parameters. ``model``: in evaluation mode.

    ``layout``: of its experts' records. ``names``: of each tensor of the record all names in ``model``'s state dict.
    ``stored_as_is``: a tensor's value is what the checkpoint holds under one of its names, converted to its dtype.
    """

    key: str
    dtype: torch.dtype
    layout: RecordLayout
    names: tuple[tuple[str, ...], ...]
    stored_as_is: bool
    model: Any = field(repr=False)

    def weights_of(self, checkpoint: ExpertCheckpoint, stored: Tensors) -> list[torch.Tensor]:
        """An expert's tensors in the order of the layout. ``stored``: all of its checkpoint's, by name.

        Raises CorruptCheckpoint.
        """
        if self.stored_as_is:
            return [
                stored[next(name for name in names if name in stored)].to(DTYPES[spec.dtype])
                for names, spec in zip(self.names, self.layout.tensors, strict=True)
            ]
        state = load_model(checkpoint, stored, self.dtype).state_dict()
        return [state[names[0]] for names in self.names]


def build_architectures(collaboration: Collaboration, dtype: str = AUTO) -> dict[str, Architecture]:
    """Of every architecture one, by its key. It reads one checkpoint each, whose weights are in memory meanwhile.

    ``dtype``: what the parameters are converted to; auto is each checkpoint's own. Raises InvalidConfig,
    UnsupportedModel, CorruptCheckpoint, which name the file and the expert.
    """
    found = {}
    for key, experts in collaboration.of_architecture().items():
        expert = experts[0]
        checkpoint = collaboration.experts[expert]
        where = f"{collaboration.file}: experts.{collaboration.graph.names[expert]}"
        try:
            found[key] = build(checkpoint, _dtype(checkpoint, dtype))
        except InvalidConfig as error:
            if dtype != AUTO:  # the caller's own choice, for all experts
                raise
            raise InvalidConfig(f"{where}.{error.field}", error.value, error.allowed) from None
        except (CorruptCheckpoint, UnsupportedModel) as error:
            raise type(error)(f"{where}: {error}") from error
    return found


def build(checkpoint: ExpertCheckpoint, dtype: torch.dtype) -> Architecture:
    """The architecture of a checkpoint. Raises UnsupportedModel, CorruptCheckpoint."""
    with ShardReader() as reader:
        stored = read_stored(checkpoint, reader)
    model = load_model(checkpoint, stored, dtype)
    state: Tensors = model.state_dict(keep_vars=True)
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in state.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    names = tuple(map(tuple, by_tensor.values()))
    first = {own[0]: state[own[0]].detach() for own in names}
    layout = RecordLayout.of(
        ((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in first.items()),
        piece_bytes=PIECE_BYTES,
    )
    as_is = _is_as_stored(names, first, stored)
    _take_out(model, [name for own in names for name in own])
    return Architecture(checkpoint.architecture, dtype, layout, names, as_is, model)


def read_stored(checkpoint: ExpertCheckpoint, reader: ShardReader, total: xxhash.xxh3_128 | None = None) -> Tensors:
    """All tensors of a checkpoint, in the order of their names. ``total``: digests their bytes."""
    stored = {}
    tensors = [checkpoint.tensors[name] for name in sorted(checkpoint.tensors)]
    with ReadAhead(reader, [(tensor, None) for tensor in tensors]) as ahead:
        for tensor in tensors:
            data = ahead.take()
            if total is not None:
                total.update(data.numpy().data)
            stored[tensor.name] = typed(data, tensor)
    return stored


def load_model(checkpoint: ExpertCheckpoint, stored: Tensors, dtype: torch.dtype) -> Any:
    """transformers' own model of a checkpoint, in evaluation mode. ``stored``: all of its tensors.

    Raises UnsupportedModel if transformers has no such model, CorruptCheckpoint if it can not be made of these tensors.
    """
    model_class = _class_of(checkpoint)
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
        with _without_bars():
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict=stored,
                dtype=dtype,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except ImportError as error:
        raise UnsupportedModel(f"{checkpoint.model} needs what is not installed: {error}") from error
    except GreenroomError:
        raise
    except Exception as error:  # the configuration is untrusted, so transformers may raise anything
        raise CorruptCheckpoint(f"{checkpoint.model} can not be made a {checkpoint.model_class}: {error}") from error
    missing = sorted(key for key in report["missing_keys"] if not _NOT_COMPUTED_WITH.search(key))
    if wrong := [*missing, *sorted(key for key, *_ in report["mismatched_keys"])]:
        raise CorruptCheckpoint(
            f"{checkpoint.model} lacks {len(wrong)} tensors of a {checkpoint.model_class}, or has them in another "
            f"shape: {', '.join(wrong[:5])}"
        )
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """transformers would show one for each of hundreds of experts."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _class_of(checkpoint: ExpertCheckpoint) -> Any:
    model_class = getattr(transformers, checkpoint.model_class, None)
    known = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not known or checkpoint.model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{checkpoint.model} is a {checkpoint.model_class} of type {checkpoint.model_type!r}, which the installed "
            f"transformers {transformers.__version__} does not know: use a newer one, or another checkpoint"
        )
    return model_class


def _dtype(checkpoint: ExpertCheckpoint, dtype: str) -> torch.dtype:
    """Raises InvalidConfig."""
    name, known = (checkpoint.dtype if dtype == AUTO else dtype), ", ".join(sorted(FLOATS))
    if name in FLOATS:
        return FLOATS[name]
    allowed = f"a config.json names one of {known}; or give --dtype" if dtype == AUTO else f"use auto or one of {known}"
    raise InvalidConfig("dtype", name, allowed)


def _is_as_stored(names: Sequence[Sequence[str]], loaded: Tensors, stored: Mapping[str, torch.Tensor]) -> bool:
    """Whether one expert's stored tensors, taken by their names, are to the bit what transformers has made of them."""
    for own in names:
        tensor = loaded[own[0]]
        found = next((stored[name] for name in own if name in stored), None)
        if found is None or found.shape != tensor.shape:
            return False
        if not torch.equal(_bits(found.to(tensor.dtype)), _bits(tensor)):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _take_out(model: Any, names: Sequence[str]) -> None:
    """Put the tensors of these names on the meta device. Those of equal names stay one."""
    made: dict[int, torch.Tensor] = {}
    for name in names:
        owner, leaf = owner_of(model, name)
        tensor = owner[leaf]
        if tensor is not None and not tensor.is_meta:
            made.setdefault(id(tensor), tensor.detach().to("meta"))
            owner[leaf] = made[id(tensor)]


def owner_of(model: Any, name: str) -> tuple[dict[str, torch.Tensor], str]:
    """The dictionary of a module that holds the parameter or buffer of this name, and its name there."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf
