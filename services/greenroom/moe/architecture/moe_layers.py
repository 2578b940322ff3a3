"""Where a model's MoE layers are, and the shapes of their experts."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts

from greenroom.core.errors import CorruptCheckpoint, GreenroomError, UnsupportedModel
from greenroom.moe.architecture.families import unsupported

CONSTRUCTING = threading.Lock()
"""Held while transformers builds a model, because it then changes torch's default dtype for all threads."""


class Outlined(TorchFunctionMode):
    """Within it a model is built on the meta device, and its weights are read later.

    No random initial values are drawn, and rotary frequencies are computed on the CPU. On the meta device torch would
    do both in Python, which imports sympy and keeps 80 MB.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        if func is torch.arange:
            kwargs.setdefault("device", "cpu")
        if func is torch.cat:
            tensors, *others = args or (kwargs.pop("tensors"),)
            if len({tensor.device for tensor in tensors}) > 1:  # frequencies, and zeros behind them
                tensors = [tensor.to("meta") for tensor in tensors]
            args = (tensors, *others)
        return func(*args, **kwargs)


_INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "config")
_TOP_K_NAMES = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k")


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of each expert of a layer. ``shape``: of a single expert's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One MoE layer. ``name``: the dotted path of its experts module; ``tensors``: of each expert, in record order.

    ``stacked``: the module holds one parameter for each tensor, with the experts along the first dimension, as in
    transformers' experts interface. Otherwise each expert is a child module ``expert_N``.
    """

    name: str
    experts: int
    top_k: int
    tensors: tuple[ExpertTensor, ...]
    stacked: bool

    def parameter(self, tensor: str, expert: int) -> str:
        """The name of the model's parameter that holds this tensor of this expert."""
        return f"{self.name}.{tensor}" if self.stacked else f"{self.name}.expert_{expert}.{tensor}"


def model_class(config: Any) -> type[Any]:
    """transformers' class that generates text with this configuration. Raises UnsupportedModel if there is none."""
    mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise unsupported(config.model_type, "transformers has no class that generates text with it")
    found: Any = mapping[type(config)]
    generating: type[Any] = found[0] if isinstance(found, tuple) else found
    of = getattr(generating, "config_class", None)
    # A type of its own alone is none: some are computed by another family's class.
    if of is not None and not isinstance(config, of) and config.get_text_config() is not config:
        raise unsupported(
            config.model_type,
            f"it is a multimodal checkpoint, whose text model transformers runs by itself ({generating.__name__}, of a "
            f"{of.__name__}); only checkpoints of the text model alone are served",
        )
    return generating


def blueprint(config: Any, dtype: torch.dtype) -> Any:
    """The whole model on the meta device: names, shapes and dtypes without memory.

    Raises UnsupportedModel if transformers has no class for it, CorruptCheckpoint if transformers can not build a model
    from the configuration.
    """
    made_by = model_class(config)
    try:
        with CONSTRUCTING, torch.device("meta"), Outlined():
            return made_by._from_config(config, dtype=dtype)
    except GreenroomError:
        raise
    except Exception as error:  # the JSON is untrusted, so transformers may raise anything
        raise CorruptCheckpoint(
            f"transformers can make no {made_by.__name__} of config.json: {type(error).__name__}: {error}"
        ) from error


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that holds experts, in the order in which the model runs them."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts"):
            yield name, module


def is_kept_wider(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers keeps a parameter in another dtype than the one that the model is loaded in."""
    kept = [pattern for pattern, wide in model._get_dtype_plan(dtype).items() if wide != dtype]
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in kept)


def describe_layers(model: Any, config: Any, dtype: torch.dtype) -> tuple[MoeLayer, ...]:
    """The MoE layers of a model that is to be loaded in ``dtype``, and still has its experts' parameters.

    Raises UnsupportedModel if it has none, or if an expert does not use a known interface. Raises CorruptCheckpoint if
    the configuration contradicts itself about experts.
    """
    layers = tuple(_describe(name, module, config) for name, module in experts_modules(model))
    for layer in layers:
        names = [layer.parameter(tensor.name, 0) for tensor in layer.tensors]
        if any(is_kept_wider(model, name, dtype) for name in names):
            raise unsupported(config.model_type, f"transformers keeps some of its experts' tensors wider than {dtype}")
    if not layers:
        raise unsupported(config.model_type, "the model is dense, or its experts are not where others have them")
    return layers


def _describe(name: str, module: nn.Module, config: Any) -> MoeLayer:
    if isinstance(module, SwitchTransformersExperts):
        return _describe_modules(name, module)
    lacking = [attribute for attribute in _INTERFACE if not hasattr(module, attribute)]
    if lacking:
        raise unsupported(
            config.model_type, f"{type(module).__name__} does not use transformers' experts interface ({lacking[0]})"
        )
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = [up, f"{up}_bias", "down_proj", "down_proj_bias"] if module.has_bias else [up, "down_proj"]
    found = dict(module.named_parameters(recurse=False))
    experts = int(module.num_experts)  # type: ignore[arg-type]
    if set(found) != set(names) or any(value.shape[0] != experts for value in found.values()):
        shapes = {key: tuple(value.shape) for key, value in found.items()}
        raise unsupported(config.model_type, f"{name} has the parameters {shapes}, not {names} for {experts} experts")
    tensors = tuple(ExpertTensor(key, tuple(found[key].shape[1:]), found[key].dtype) for key in names)
    return MoeLayer(name, experts, _top_k(config, experts), tensors, stacked=True)


def _describe_modules(name: str, module: SwitchTransformersExperts) -> MoeLayer:
    first = module["expert_0"]
    tensors = tuple(ExpertTensor(key, tuple(value.shape), value.dtype) for key, value in first.named_parameters())
    return MoeLayer(name, len(module), 1, tensors, stacked=False)


def _top_k(config: Any, experts: int) -> int:
    text = config.get_text_config()
    for name in _TOP_K_NAMES:
        if isinstance(value := getattr(text, name, None), int):
            if not 1 <= value <= experts:
                raise CorruptCheckpoint(
                    f"config.json has {name} {value}: a token takes at least 1 expert and at most the {experts} that a "
                    "layer has"
                )
            return value
    raise UnsupportedModel(f"the configuration of {config.model_type} says nowhere how many experts a token takes")
