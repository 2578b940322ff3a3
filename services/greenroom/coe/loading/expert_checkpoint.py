"""An expert's checkpoint, as far as its configuration and the headers of its weights tell. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import xxhash

from greenroom.checkpoints.config_file import read_config
from greenroom.checkpoints.quantized import advice, quantization_method
from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.checkpoints.weight_files import stored_tensors
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel

_CLASSES: Final = {
    "ForImageClassification": "classifies images",
    "ForObjectDetection": "finds objects in images",
    "ForSequenceClassification": "classifies texts",
    "Model": "embeds images or texts",
}
_WITHOUT_EFFECT: Final = frozenset(
    {
        "_name_or_path", "architectures", "dtype", "finetuning_task", "id2label", "label2id", "name_or_path",
        "problem_type", "torch_dtype", "transformers_version",
    }
)  # fmt: skip
"""What a configuration says that changes nothing of the computation, or is part of an architecture's key apart."""

IMAGE_SETTINGS: Final = "preprocessor_config.json"
TOKENIZERS: Final = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_RGB: Final = 3


class Task(StrEnum):
    """What an expert gives."""

    IMAGE_CLASSIFICATION = "image classification"
    OBJECT_DETECTION = "object detection"
    TEXT_CLASSIFICATION = "text classification"
    EMBEDDING = "embedding"


class InputKind(StrEnum):
    """What an expert takes."""

    IMAGE = "image"
    TEXT = "text"


_TASKS: Final = {
    "ForImageClassification": Task.IMAGE_CLASSIFICATION,
    "ForObjectDetection": Task.OBJECT_DETECTION,
    "ForSequenceClassification": Task.TEXT_CLASSIFICATION,
    "Model": Task.EMBEDDING,
}
_INPUTS: Final = {
    Task.IMAGE_CLASSIFICATION: InputKind.IMAGE,
    Task.OBJECT_DETECTION: InputKind.IMAGE,
    Task.TEXT_CLASSIFICATION: InputKind.TEXT,
}


@dataclass(frozen=True, slots=True)
class ExpertCheckpoint:
    """``model``: as the definition names it. ``model_class``: transformers' class. ``labels``: by their number; none of
    an embedding. ``dtype``: what transformers' ``dtype="auto"`` chooses. ``problem_type``: as in transformers.

    ``architecture``: experts with the same one can share a skeleton, because they differ in nothing but the values of
    their weights, the names of their labels, and what comes before and after the model.
    """

    model: str
    folder: Path
    task: Task
    takes: InputKind
    model_class: str
    model_type: str
    labels: tuple[str, ...]
    dtype: str
    problem_type: str | None
    architecture: str
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    @property
    def weight_bytes(self) -> int:
        """As they are stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_expert(folder: Path, model: str) -> ExpertCheckpoint:
    """The checkpoint in ``folder``. ``model``: what errors call it.

    Raises UnsupportedModel if it is of no class that is served, or has its weights as pickle or code of its own,
    CorruptCheckpoint if files are missing, broken, or contradict each other.
    """
    raw = read_config(folder, model)
    _refuse_code(folder, model)
    method = quantization_method(raw)
    if method is not None:
        raise UnsupportedModel(f"{model} is quantised ({method}), which no expert may be: {advice(method)}")
    model_class = _model_class(raw, model)
    suffix = next(end for end in _CLASSES if model_class.endswith(end))
    task = _TASKS[suffix]
    takes = _takes(task, folder, model)
    if takes is InputKind.IMAGE and raw.get("num_channels", _RGB) != _RGB:
        raise UnsupportedModel(f"{model} takes images of {raw['num_channels']} channels; experts get RGB")
    tensors = stored_tensors(folder, model)
    dtype = _dtype(raw, tensors)
    labels = () if task is Task.EMBEDDING else _labels(raw, model)
    return ExpertCheckpoint(
        model=model,
        folder=folder,
        task=task,
        takes=takes,
        model_class=model_class,
        model_type=raw["model_type"],
        labels=labels,
        dtype=dtype,
        problem_type=raw.get("problem_type"),
        architecture=_architecture(raw, model_class, dtype, len(labels), tensors),
        tensors=tensors,
    )


def _refuse_code(folder: Path, model: str) -> None:
    for name in ("config.json", IMAGE_SETTINGS, "tokenizer_config.json", "processor_config.json"):
        if "auto_map" in _settings(folder / name, model):
            raise UnsupportedModel(
                f"{name} of {model} names code of its own (auto_map), which is never run: use a checkpoint of a class "
                "that transformers has, or take the entry out if it is of such a class"
            )


def _settings(path: Path, model: str) -> dict[str, Any]:
    """Empty if there is no such file."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise TypeError(f"a {type(found).__name__}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path.name} of {model} can not be read: {error}") from error
    return found


def _model_class(raw: Mapping[str, Any], model: str) -> str:
    """Raises UnsupportedModel."""
    named = raw.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise UnsupportedModel(f"config.json of {model} does not say of which class it is (architectures)")
    name: str = named[0]
    if not name.endswith(tuple(_CLASSES)):
        served = ", ".join(f"…{end} ({what})" for end, what in _CLASSES.items())
        raise UnsupportedModel(f"{model} is a {name}; served: {served}")
    if raw.get("is_encoder_decoder") and name.endswith("Model"):
        raise UnsupportedModel(f"{model} is a {name}, an encoder-decoder, which has no embedding: use its encoder")
    return name


def _takes(task: Task, folder: Path, model: str) -> InputKind:
    """What it takes, whose settings must be there. Raises CorruptCheckpoint."""
    has = {
        InputKind.IMAGE: (folder / IMAGE_SETTINGS).exists(),
        InputKind.TEXT: any((folder / name).exists() for name in TOKENIZERS),
    }
    takes = _INPUTS.get(task) or (InputKind.IMAGE if has[InputKind.IMAGE] else InputKind.TEXT)
    if has[takes]:
        return takes
    if task is Task.EMBEDDING:
        missing = f"{IMAGE_SETTINGS} or tokenizer ({TOKENIZERS[0]})"
    else:
        missing = IMAGE_SETTINGS if takes is InputKind.IMAGE else f"tokenizer ({' or '.join(TOKENIZERS[:3])})"
    raise CorruptCheckpoint(
        f"{model} has no {missing}, without which its inputs can not be prepared: copy it from the checkpoint that the "
        "model was trained from"
    )


def _labels(raw: Mapping[str, Any], model: str) -> tuple[str, ...]:
    """As transformers has them: without names they are LABEL_0 and so on. Raises CorruptCheckpoint."""
    try:
        count = int(raw.get("num_labels") or 2)
        named = raw.get("id2label") or {number: f"LABEL_{number}" for number in range(count)}
        by_number = {int(number): str(label) for number, label in named.items()}
        return tuple(by_number[number] for number in range(len(by_number)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"id2label of {model} does not number its labels from 0: {error!r}") from error


def _dtype(raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    named = raw.get("dtype") or raw.get("torch_dtype")
    if isinstance(named, str):
        return named.removeprefix("torch.")
    return next((_DTYPES[tensor.dtype] for tensor in tensors.values() if tensor.dtype in _DTYPES), "float32")


def _architecture(
    raw: Mapping[str, Any], model_class: str, dtype: str, labels: int, tensors: Mapping[str, StoredTensor]
) -> str:
    config = {key: value for key, value in raw.items() if key not in _WITHOUT_EFFECT}
    shapes: Sequence[Any] = sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors.values())
    text = json.dumps([model_class, dtype, labels, config, shapes], sort_keys=True)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
