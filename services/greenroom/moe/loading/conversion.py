"""Makes one expert from a checkpoint's tensors, through transformers' own conversion mapping.

Checkpoints store experts one by one or stacked, with gate and up projections apart or fused, under their own names. In
memory each MoE layer has fused parameters with the experts along the first dimension. transformers converts whole
parameters. Here the same renamings and operations are applied to one expert at a time. The result is the same because
no operation mixes experts; a mapping that might is refused.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from greenroom.checkpoints.quantized import quantization_method, settings_of
from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.checkpoints.shard_reader import place_of, stored_shape, torch_dtype, typed
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.moe.architecture.families import family_of, unsupported
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer, blueprint, describe_layers
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, BadCodes, EncodesNumbers, ExpertFormat
from greenroom.moe.formats.gguf_storage import GgufMxfp4, matrix_format_of, storage_of
from greenroom.moe.formats.grouped_format import MatrixFormat
from greenroom.moe.formats.registry import shipped
from greenroom.moe.formats.stored_matrix import MatrixStorage
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.dense_matrices import StoredMatrix, linear_layers
from greenroom.moe.loading.quantization import dequantizing_converters, is_dequantizing

_OF_CODES: Final = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "_blocks")
"""What names of tensors end with that only quantised checkpoints have."""

Fed = dict[tuple[str, str], list[StoredTensor]]
"""The checkpoint's tensors by source pattern ("": stored as used) and part of a stored matrix ("": it is in one)."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The input of one source pattern of a converter: one tensor an expert, or one with all experts stacked.

    ``part``: which one of a stored matrix's parts it is ("": a matrix is one tensor).
    """

    pattern: str
    tensors: tuple[StoredTensor, ...]
    stacked: bool
    part: str = ""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """In most checkpoints all experts have one."""
        return tuple(dict.fromkeys(tensor.dtype for tensor in self.tensors))

    def of(self, expert: int) -> tuple[StoredTensor, int | None]:
        """The stored tensor with this expert's weights, and their slice of it (None: all of it)."""
        return (self.tensors[0], expert) if self.stacked else (self.tensors[expert], None)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one or more of a layer's tensors are made. Without a converter they are used as stored.

    ``coded``: the tensor that is stored as codes. None: numbers are stored. ``storage``: how each of its matrices is
    stored in parts, whose feeds follow each other. None: they are no matrices in parts.
    """

    layer: str
    target: str
    dtype: torch.dtype
    feeds: tuple[Feed, ...]
    converter: WeightConverter | None
    coded: ExpertTensor | None = None
    storage: MatrixStorage | None = None

    @property
    def build(self) -> tuple[Any, ...]:
        """What is done to an expert's weights. It is the same for recipes that do the same to weights of one shape."""
        return (
            self.target,
            self.dtype,
            repr(self.converter.operations) if self.converter is not None else "",
            *((feed.pattern, feed.part, feed.stacked, feed.dtypes, feed.tensors[0].shape) for feed in self.feeds),
        )

    @property
    def parts(self) -> tuple[Feed, ...]:
        """The feeds in the order in which a format describes codes, that of the converter's patterns."""
        if self.converter is None:
            return self.feeds
        patterns = self.converter.source_patterns
        return tuple(sorted(self.feeds, key=lambda feed: patterns.index(feed.pattern)))

    @property
    def patterns(self) -> tuple[str, ...]:
        """Of the matrices, in the order of the feeds."""
        return tuple(dict.fromkeys(feed.pattern for feed in self.feeds))

    def matrices(self, weights: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The parts of each stored matrix. ``weights``: in the order of the feeds."""
        assert self.storage is not None
        count = len(self.storage.parts)
        return [weights[first : first + count] for first in range(0, len(weights), count)]

    def make(self, weights: list[torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """One expert's tensors by name. ``weights``: of the ``patterns``; a stacked one is given as one slice."""
        if self.converter is None:
            return {self.target: weights[0][0] if self.feeds[0].stacked else weights[0]}
        converter = copy.deepcopy(self.converter)
        for pattern, weight in zip(self.patterns, weights, strict=True):
            converter.collected_tensors[pattern].append(weight)
        if isinstance(converter.operations[0], MergeModulelist):  # merging one tensor is a copy with one more dimension
            converter.collected_tensors = {
                key: [one.unsqueeze(0)] for key, (one,) in converter.collected_tensors.items()
            }
            converter.operations = converter.operations[1:] or [_Rename()]
        made = converter.convert(f"{self.layer}.{self.target}", model=model, config=model.config)
        tensors = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {name.removeprefix(f"{self.layer}."): tensor.squeeze(0) for name, tensor in tensors.items()}


class _Rename(ConversionOps):  # type: ignore[misc]
    """Takes the place of a converter that only merges."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        ((tensor,),) = input_dict.values()
        return {target_patterns[0]: tensor}


class ExpertPlan:
    """How every expert of a checkpoint is made from its tensors, and where everything else is.

    ``dense``: the tensors of everything else, by the names that transformers loads them by. ``dense_in_parts``: its
    matrices that are stored in parts, by the name of the tensor that they make. ``dense_stored``: matrices that stay as
    they are stored, by the path of their linear layer; they are in neither of these. ``unused``: of matrices
    in parts, biases that the model has no place for and zero points of symmetric codes; older tools write zeros there.

    Reads no weights. Raises UnsupportedModel for a mapping that can not be applied expert by expert, and
    CorruptCheckpoint if tensors are missing or do not have the shapes that the configuration says.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        expert_format: ExpertFormat | Sequence[ExpertFormat] = PLAIN_FORMAT,
        *,
        dense_as_stored: bool = False,
        dense_required: bool = False,
    ) -> None:
        """``expert_format``: of the records, or of each layer's. Plain, the one that the checkpoint ships its experts
        in, or one that encodes numbers. ``dense_as_stored``: linear layers outside the experts stay in their codes,
        where compiled products know these. Of families that are not proven they do so if it is ``dense_required``:
        modules of a model may use a linear layer's numbers in ways of their own. A layer whose weights turn out to be
        in no order that products know is then refused, and else expanded.
        """
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.dense_required = dense_required
        self._shipping = shipped(checkpoint.config, checkpoint.tensors)
        self._shipped, self.storage = self._shipping.format, self._shipping.storage
        self._leaves_out = self._shipping.leaves_out
        self._model = blueprint(checkpoint.config, dtype)
        self.layers = describe_layers(self._model, checkpoint.config, dtype)
        if isinstance(expert_format, Sequence):
            self.formats = list(expert_format)
            """Of each layer's records."""
        else:
            self.formats = [expert_format.of(layer.name) for layer in self.layers]
        self._asked = tuple(self.formats)  # its description stays, whatever is kept otherwise
        self._numbers_of = {layer.name: number for number, layer in enumerate(self.layers)}
        self.dense: dict[str, StoredTensor] = {}
        self.dense_in_parts: dict[str, dict[str, StoredTensor]] = {}
        self.unused: list[StoredTensor] = []
        self._unconverted: dict[str, str] = {}  # a dense tensor's name in the checkpoint, by its name in the model
        self.recipes = self._recipes()
        stays = dense_as_stored and (dense_required or family_of(checkpoint.config).proven)
        self.dense_stored = self._keep_dense() if stays else {}
        checked = set()
        for layer, recipes in zip(self.layers, self.recipes, strict=True):
            # In most models all experts have one build.
            if (build := (self.format_of(layer.name).name, *_build(layer, recipes))) not in checked:
                self._check(layer, recipes)
            checked.add(build)

    def make(self, recipe: Recipe, weights: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of one expert's record, by name. Codes stay codes unless the record is plain.

        Raises DoesNotFit if its format encodes numbers and has no room for these.
        """
        if recipe.storage is not None:
            return self._make_of_parts(recipe, recipe.storage, recipe.matrices(weights))
        own = self.format_of(recipe.layer)
        if recipe.coded is not None and own is not PLAIN_FORMAT:
            return own.make(recipe.coded, self._parts(recipe, weights))
        numbers = self._numbers(recipe, weights)
        if not isinstance(own, EncodesNumbers):
            return numbers
        tensors = {tensor.name: tensor for tensor in self.layers[self._numbers_of[recipe.layer]].tensors}
        return {
            name: part for target, made in numbers.items() for name, part in own.encode(tensors[target], made).items()
        }

    def format_of(self, layer: str) -> ExpertFormat:
        """Of the records of the layer with this name."""
        return self.formats[self._numbers_of[layer]]

    def _numbers(self, recipe: Recipe, weights: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """One expert's tensors by name, as numbers. Weights are cast first, as transformers does."""
        cast = [weight.to(recipe.dtype) if weight.is_floating_point() else weight for weight in weights]
        return recipe.make(cast, self._model)

    def _make_of_parts(
        self, recipe: Recipe, storage: MatrixStorage, matrices: list[list[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        own = self.format_of(recipe.layer)
        if own is PLAIN_FORMAT:
            return recipe.make([storage.numbers(parts, recipe.dtype) for parts in matrices], self._model)
        assert recipe.coded is not None
        codes = [storage.codes(parts) for parts in matrices]
        if isinstance(storage, GgufMxfp4):
            return own.make(recipe.coded, storage.joined(codes))
        joined = codes[0] if len(codes) == 1 else [torch.cat(parts) for parts in zip(*codes, strict=True)]
        return own.make(recipe.coded, joined)

    def check(self, recipe: Recipe, weights: list[torch.Tensor], expert: int) -> None:
        """Raises CorruptCheckpoint, with file and tensor, if some of the expert's codes mean no numbers."""
        if recipe.coded is None:
            return
        first = 0
        try:
            if recipe.storage is None:
                self._shipped.check(recipe.coded, self._parts(recipe, weights))
                return
            for number, parts in enumerate(recipe.matrices(weights)):
                first = number * len(parts)
                recipe.storage.check(parts, recipe.dtype)
        except BadCodes as error:
            stored, _ = (recipe.parts if recipe.storage is None else recipe.feeds)[first + error.part].of(expert)
            raise CorruptCheckpoint(f"{stored.name} in {stored.shard}: expert {expert} {error}") from error

    def _parts(self, recipe: Recipe, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """One expert's codes, given in the order of the feeds, as the format describes them."""
        assert recipe.coded is not None
        own = dict(zip((feed.pattern for feed in recipe.feeds), weights, strict=True))
        shapes = self._shipped.stored_shapes(recipe.coded)
        return [own[feed.pattern].view(shape) for feed, shape in zip(recipe.parts, shapes, strict=True)]

    def keep_plain(self, number: int) -> None:
        """From now on the records of layer ``number`` hold numbers, although another format was asked for."""
        self.formats[number] = PLAIN_FORMAT

    def expand_dense(self, path: str) -> None:
        """From now on the linear layer at ``path`` is numbers, although it was to stay as it is stored."""
        del self.dense_stored[path]

    def joins(self, recipe: Recipe) -> bool:
        """Whether numbers are no more than the weights as stored, one after the other, to the bit.

        Then packing need not make them. Tried with the bytes of one expert, drawn at random.
        """
        if recipe.storage is not None:
            return False
        all_stored = [tensor for feed in recipe.feeds for tensor in feed.tensors]
        if any(tensor.block is not None or torch_dtype(tensor) != recipe.dtype for tensor in all_stored):
            return False
        stored = [feed.of(0) for feed in recipe.feeds]
        if recipe.converter is None:
            return True
        random, weights = np.random.default_rng(0), []
        for tensor, part in stored:
            _, nbytes = place_of(tensor, part)
            weights.append(typed(torch.from_numpy(random.integers(0, 256, nbytes, dtype=np.uint8)), tensor, part))
        made = self._numbers(recipe, weights)
        if made.keys() != {recipe.target} or made[recipe.target].dtype != recipe.dtype:
            return False
        joined = torch.cat([_bytes_of(weight) for weight in weights])
        return torch.equal(_bytes_of(made[recipe.target]), joined)

    @property
    def dense_formats(self) -> tuple[str, ...]:
        """Of ``dense_stored``, in order of their names."""
        return tuple(sorted({one.format.name for one in self.dense_stored.values()}))

    @property
    def stored(self) -> list[StoredTensor]:
        """All tensors of the checkpoint that become experts."""
        return [t for recipes in self.recipes for recipe in recipes for feed in recipe.feeds for t in feed.tensors]

    def description(self) -> str:
        """Everything besides the weights that determines the converted experts."""
        asked = tuple(dict.fromkeys(self._asked))
        lines = [f"{own.name} {own.version}" for own in asked if own is not PLAIN_FORMAT]
        lines += [] if self.storage is None else [repr(self.storage)]
        for layer, own, recipes in zip(self.layers, self._asked, self.recipes, strict=True):
            if len(asked) > 1:
                lines.append(own.name)
            lines.append(repr(layer))
            for recipe in recipes:
                operations = [] if recipe.converter is None else recipe.converter.operations
                lines.append(f"{recipe.target} {recipe.dtype} {operations}")
                for feed in recipe.feeds:
                    part = f" {feed.part}" if feed.part else ""
                    lines += [f" {feed.pattern}{part} {t.name} {t.dtype} {t.shape}" for t in feed.tensors]
        return "\n".join(lines)

    def _recipes(self) -> list[list[Recipe]]:
        mapping = get_model_conversion_mapping(self._model)
        mapping += dequantizing_converters(self.checkpoint.config, self.dtype)
        mapping += [] if self.checkpoint.gguf is None else self.checkpoint.gguf.converters()
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        collected = self._collect(renamings, converters)
        return [
            [self._recipe(layer, target, fed, by_pattern) for target, fed in collected[layer.name].items()]
            for layer in self.layers
        ]

    def _collect(self, renamings: list[WeightRenaming], converters: list[WeightConverter]) -> dict[str, dict[str, Fed]]:
        """Layer → tensor → what it is fed with, experts ascending."""
        owners = {
            layer.parameter(tensor.name, expert): (layer.name, tensor.name)
            for layer in self.layers
            for tensor in layer.tensors
            for expert in range(layer.experts)
        }
        state = self._model.state_dict()
        prefix = self._model.base_model_prefix
        collected: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        in_parts: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        unplaced = []
        for key in sorted(self.checkpoint.tensors, key=dot_natural_key):
            stored = self.checkpoint.tensors[key]
            name, part = self._part_of(key, stored)
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if renamed not in state and name in state:
                renamed, pattern = rename_source_key(name, [], [], prefix, state)
            if renamed in owners:
                layer, tensor = owners[renamed]
                collected[layer][tensor][pattern or "", part].append(stored)
            elif renamed in state and part:
                self.dense_in_parts[name] = in_parts[name]
            elif renamed in state:
                self.dense[key] = stored
            else:
                unplaced.append(key)
                continue
            if part:
                in_parts[name][part] = stored
            if renamed in state and not pattern:
                self._unconverted[renamed] = name
        for name, parts in in_parts.items():
            self._check_parts(name, parts)
        self._unplaced = unplaced
        self._refuse_orders(unplaced)
        self.unused = [self.checkpoint.tensors[key] for key in unplaced if self._is_of_parts(key)]
        ignored = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        _refuse_more_layers(
            self.checkpoint.tensors.keys() - unplaced,
            [key for key in unplaced if not any(re.search(pattern, key) for pattern in ignored)],
        )
        return collected

    def _keep_dense(self) -> dict[str, StoredMatrix]:
        """Takes what stays as it is stored out of the other dense tensors."""
        kept = {}
        for path, linear in linear_layers(self._model, self.layers, self.dtype).items():
            name = self._unconverted.get(f"{path}.weight")
            found = None if name is None else self._stored_as(name)
            if name is None or found is None:
                continue
            own, storage, parts = found
            self.dense.pop(name, None)
            self.dense_in_parts.pop(name, None)
            stored = tuple(parts[part] for part in storage.parts)
            kept[path] = StoredMatrix(path, name, linear.out_features, linear.in_features, own, storage, stored)
        return kept

    def _stored_as(self, name: str) -> tuple[MatrixFormat, MatrixStorage, dict[str, StoredTensor]] | None:
        """What a dense matrix can stay as, how it is stored, and its parts. None: it can not."""
        if (parts := self.dense_in_parts.get(name)) is not None:
            own, storage = self._shipping.dense_format(parts), self.storage
        elif (stored := self.dense.get(name)) is not None and stored.block is not None:
            own = matrix_format_of(stored.block)
            parts, storage = {"": stored}, None if own is None else storage_of(stored.block, own)
        else:
            return None
        return None if own is None or storage is None else (own, storage, parts)

    def _part_of(self, key: str, stored: StoredTensor) -> tuple[str, str]:
        """The name of the matrix that a tensor is a part of, and which part it is ("": it is no part)."""
        module, _, last = key.rpartition(".")
        if self.storage is None or last not in self.storage.parts or not self.storage.is_part(stored):
            return key, ""
        return f"{module}.weight", last

    def _is_of_parts(self, key: str) -> bool:
        """Whether it is the bias, or the zero points, of a matrix that is stored in parts."""
        module, _, last = key.rpartition(".")
        return (
            last in ("bias", "weight_zero_point")
            and self.storage is not None
            and f"{module}.{self.storage.parts[0]}" in self.checkpoint.tensors
        )

    def _refuse_orders(self, unplaced: Sequence[str]) -> None:
        """Refuses an order of a matrix's inputs that its storage does not take: groups' scales would go to others."""
        for key in unplaced:
            module, _, last = key.rpartition(".")
            if (
                self.storage
                and last.endswith("g_idx")
                and f"{module}.{self.storage.parts[0]}" in self.checkpoint.tensors
            ):
                raise CorruptCheckpoint(
                    f"{key} in {self.checkpoint.tensors[key].shard} gives an order of inputs, and the configuration's "
                    "quantization_config says that there is none (actorder)"
                )

    def _check_parts(self, name: str, parts: dict[str, StoredTensor]) -> None:
        """Checks that a stored matrix has all of its parts, and that they belong together."""
        assert self.storage is not None
        if lacking := [part for part in self.storage.parts if part not in parts]:
            found = next(iter(parts.values()))
            raise CorruptCheckpoint(f"{found.name} in {found.shard} has no {' and no '.join(lacking)} beside it")
        if empty := [part for part in parts.values() if 0 in part.shape]:
            raise CorruptCheckpoint(f"{empty[0].name} in {empty[0].shard} has the shape {empty[0].shape}: it is empty")
        if name in self.checkpoint.tensors and "weight" not in self.storage.parts:
            raise CorruptCheckpoint(f"{name} is stored twice: as numbers, and in {', '.join(self.storage.parts)}")
        self.storage.check_headers(parts)

    def _recipe(self, layer: MoeLayer, target: str, fed: Fed, by_pattern: dict[str, WeightConverter]) -> Recipe:
        made = next(tensor for tensor in layer.tensors if tensor.name == target)
        patterns = dict.fromkeys(pattern for pattern, _ in fed)
        converter = by_pattern[next(iter(patterns))] if "" not in patterns else None
        if "" in patterns and len(patterns) > 1:
            raise CorruptCheckpoint(f"{layer.name}.{target} is stored twice, in two layouts")
        merges = converter is not None and any(isinstance(op, MergeModulelist) for op in converter.operations)
        stacked = layer.stacked and not merges
        storage = self.storage if any(part for _, part in fed) else None
        feeds = tuple(Feed(pattern, tuple(found), stacked, part) for (pattern, part), found in fed.items())
        blocks = None if self.format_of(layer.name) is PLAIN_FORMAT else feeds[0].tensors[0].block
        if self.storage is not None and len(made.shape) > 1:
            self._check_left_out(layer, target, feeds)
        coded = made if storage is not None or (converter is not None and is_dequantizing(converter)) else None
        for feed in feeds:
            _check_feed(layer, target, feed, coded is not None)
        if converter is not None:
            if lacking := [pattern for pattern in converter.source_patterns if pattern not in patterns]:
                raise CorruptCheckpoint(f"{layer.name}.{target}: the checkpoint has nothing for {', '.join(lacking)}")
            _check_separable(self.checkpoint.config.model_type, converter, merges)
        if storage is not None:
            if stacked:
                raise UnsupportedModel(f"{layer.name}.{target} is quantised with all experts in one tensor")
            found = {(feed.pattern, feed.part): feed for feed in feeds}
            sources = patterns if converter is None else converter.source_patterns
            feeds = tuple(found[pattern, part] for pattern in sources for part in storage.parts)
        if blocks is not None:
            coded, storage = made, storage_of(blocks, self.format_of(layer.name))
            if converter is not None:
                order = converter.source_patterns.index
                feeds = tuple(sorted(feeds, key=lambda feed: order(feed.pattern)))
        recipe = Recipe(layer.name, target, made.dtype, feeds, converter, coded, storage)
        _check_codes(layer, recipe, self._shipped.stored_shapes(made))
        return recipe

    def _check_left_out(self, layer: MoeLayer, target: str, feeds: tuple[Feed, ...]) -> None:
        """Checks that what is stored as numbers is said to be."""
        plain = [stored for feed in feeds if not feed.part for stored in feed.tensors]
        for stored in plain:
            if not self._leaves_out(stored.name.rpartition(".")[0]) or any(feed.part for feed in feeds):
                raise _not_coded(stored)
        own = self.format_of(layer.name)
        if plain and own is not PLAIN_FORMAT:
            raise UnsupportedModel(
                f"{layer.name}.{target} is stored as numbers, and other experts as {own.name}: use "
                "--experts-as expanded"
            )

    def _check(self, layer: MoeLayer, recipes: list[Recipe]) -> None:
        """Make the first expert from zeros, to check that the recipes give all of its tensors.

        Not on the meta device, where torch would run converters in Python, with sympy.
        """
        made: dict[str, torch.Tensor] = {}
        own = self.format_of(layer.name)
        record, make = own.record(layer), self.make
        if isinstance(own, EncodesNumbers):  # the numbers are what can be wrong
            record, make = PLAIN_FORMAT.record(layer), self._numbers
        for recipe in recipes:
            weights = []
            for stored, part in (feed.of(0) for feed in recipe.feeds):
                codes = recipe.storage is not None
                shape = stored_shape(stored, codes=codes)
                shape = shape if part is None else (1, *shape[1:])
                weights.append(torch.zeros((), dtype=torch_dtype(stored, codes=codes)).expand(shape))
            if recipe.storage is not None:
                self._check_joined(recipe, recipe.storage, recipe.matrices(weights))
            made |= make(recipe, weights)
        for tensor in record.tensors:
            if tensor.name not in made:
                raise CorruptCheckpoint(f"the checkpoint lacks {layer.name}.{tensor.name}{self._hint_of_codes()}")
            if tuple(made[tensor.name].shape) != tensor.shape:
                raise CorruptCheckpoint(
                    f"an expert's {tensor.name} in {layer.name} has the shape {tuple(made[tensor.name].shape)} in the "
                    f"checkpoint and {tensor.shape} by its configuration"
                )

    def _hint_of_codes(self) -> str:
        """For an error about tensors that are missing: what to do if there are codes in their place, and nothing says
        so. Empty: there are none."""
        if quantization_method(settings_of(self.checkpoint.config)) is not None:
            return ""
        found = next((key for key in self._unplaced if key.endswith(_OF_CODES)), None)
        if found is None:
            return ""
        return (
            f"; it has {found}, as quantised ones have, and config.json has no quantization_config: add it. Older "
            'tools of GPTQ wrote it to quantize_config.json, without the "quant_method": "gptq" that it needs'
        )

    def _check_joined(self, recipe: Recipe, storage: MatrixStorage, matrices: list[list[torch.Tensor]]) -> None:
        """Checks that matrices of this kind make the tensor, and that a converter puts them one behind the other, as a
        record does."""
        assert recipe.coded is not None
        shapes = [storage.numbers(parts, recipe.dtype).shape for parts in matrices]
        places = torch.arange(sum(math.prod(shape) for shape in shapes), dtype=torch.int32)
        each = torch.split(places, [math.prod(shape) for shape in shapes])
        made = recipe.make([part.view(shape) for part, shape in zip(each, shapes, strict=True)], self._model)
        if (shape := tuple(made[recipe.target].shape)) != recipe.coded.shape:
            raise CorruptCheckpoint(
                f"an expert's {recipe.target} in {recipe.layer} has the shape {shape} in the checkpoint and "
                f"{recipe.coded.shape} by its configuration"
            )
        own = self.format_of(recipe.layer)
        in_order = isinstance(storage, GgufMxfp4) or torch.equal(made[recipe.target].reshape(-1), places)
        if own is not PLAIN_FORMAT and not in_order:
            raise UnsupportedModel(
                f"{recipe.layer}.{recipe.target} is not its stored matrices one behind the other, so it can not stay "
                f"{own.name}: use --experts-as expanded"
            )


def _not_coded(stored: StoredTensor) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{stored.name} in {stored.shard} is stored as {stored.dtype}, and the configuration's quantization_config "
        "says that it is quantised: take that out, or save the quantised tensors"
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _build(layer: MoeLayer, recipes: list[Recipe]) -> tuple[Any, ...]:
    """What ``_check`` depends on. It is the same for layers of one build."""
    return (layer.tensors, layer.stacked, *(recipe.build for recipe in recipes))


def _refuse_more_layers(placed: Iterable[str], unplaced: Iterable[str]) -> None:
    """Raises CorruptCheckpoint if tensors without a place in the model form a further layer of a kind that it has.

    A layer of another kind is accepted although its number follows: a layer that predicts several tokens ahead, for
    example, has tensors that no other layer has.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    within: dict[str, set[str]] = defaultdict(set)
    for key in placed:
        for before, number, after in _numbered(key):
            numbers[before].add(number)
            within[before].add(after)
    beyond: dict[tuple[str, int], set[str]] = defaultdict(set)
    for key in unplaced:
        for before, number, after in _numbered(key):
            if number in numbers.get(before, ()):
                within[before].add(after)
            elif before in numbers:
                beyond[before, number].add(after)
    more = sorted(place for place, parts in beyond.items() if parts <= within[place[0]])
    if more:
        before, number = more[0]
        raise CorruptCheckpoint(
            f"the checkpoint has {before}.{number}, and config.json a model with {len(numbers[before])} such layers: "
            "part of the model would be left out; the two do not belong together"
        )


def _numbered(key: str) -> Iterator[tuple[str, int, str]]:
    """Each number in a tensor's name: the text before it, the number, and the text after it."""
    parts = key.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            yield ".".join(parts[:place]), int(part), ".".join(parts[place + 1 :])


def _check_feed(layer: MoeLayer, target: str, feed: Feed, dequantized: bool) -> None:
    """Checks that there is exactly one tensor for each expert, in order, or one with all experts."""
    what = f"{layer.name}.{target}" + (f" ({feed.part})" if feed.part else "")
    coded = [tensor for tensor in feed.tensors if not tensor.is_float]
    if coded and not dequantized:
        raise UnsupportedModel(
            f"{coded[0].name} is stored as {coded[0].dtype}, as quantised weights are, and config.json has no "
            "quantization_config that says how"
        )
    if feed.stacked:
        if len(feed.tensors) != 1:
            raise CorruptCheckpoint(f"{what} is stored {len(feed.tensors)} times")
        (only,) = feed.tensors
        if not only.shape or only.shape[0] != layer.experts:
            raise CorruptCheckpoint(f"{only.name} has the shape {only.shape}, not {layer.experts} experts first")
        return
    numbers = _expert_numbers([tensor.name for tensor in feed.tensors], what)
    if numbers != list(range(layer.experts)):
        lost = sorted(set(range(layer.experts)) - set(numbers))
        raise CorruptCheckpoint(
            f"{what} has {len(numbers)} of {layer.experts} experts in the checkpoint"
            + (f"; missing: {', '.join(map(str, lost[:8]))}" if lost else "")
        )
    if len({tensor.shape for tensor in feed.tensors}) != 1:
        raise CorruptCheckpoint(f"the experts of {what} differ in shape")


def _check_codes(layer: MoeLayer, recipe: Recipe, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Checks that what should be codes (``shapes``: of an expert's) is stored as such."""
    if recipe.storage is not None:
        return
    for feed, shape in zip(recipe.parts, shapes, strict=True) if recipe.coded is not None else ():
        for stored in feed.tensors:
            expected = (layer.experts, *shape) if feed.stacked else shape
            if stored.dtype != "U8" or stored.shape != expected:
                raise CorruptCheckpoint(
                    f"{stored.name} in {stored.shard} has the shape {stored.shape} of {stored.dtype}, and by the "
                    f"configuration {expected} of U8"
                )
    if shapes and recipe.coded is None:
        raise _not_coded(recipe.feeds[0].tensors[0])


def _expert_numbers(names: list[str], what: str) -> list[int]:
    """The experts of these names: the numbers at the end of the one component in which the names differ."""
    parts = [name.split(".") for name in names]
    if len(names) == 1:
        return [0]
    varying = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    numbers = [re.search(r"\d+$", component) for component in (varying[0] if len(varying) == 1 else [""])]
    if len({len(part) for part in parts}) != 1 or None in numbers:
        raise UnsupportedModel(f"{what}: can not tell the experts apart in {names[0]}, {names[1]}, …")
    return [int(number[0]) for number in numbers if number]


def _check_separable(model_type: str, converter: WeightConverter, merges: bool) -> None:
    """Checks that the converter treats experts independently: no operation acts along their dimension."""
    acting = converter.operations
    if merges:
        at = next(i for i, op in enumerate(acting) if isinstance(op, MergeModulelist))
        if acting[at].dim != 0:
            raise unsupported(model_type, f"its experts are merged along dimension {acting[at].dim}")
        acting = acting[at + 1 :]
    for operation in acting:
        dims = [getattr(operation, name) for name in ("dim", "dim0", "dim1") if hasattr(operation, name)]
        if not dims or any(dim < 1 for dim in dims):
            raise unsupported(model_type, f"its checkpoints are converted by {operation!r}, not expert by expert")
