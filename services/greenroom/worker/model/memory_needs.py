"""How much memory a model needs besides its experts' slots, from its shapes and the configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import T5
from greenroom.core.errors import InvalidConfig
from greenroom.core.model_profile import ModelProfile
from greenroom.experts.engine import catalogue_of
from greenroom.experts.held_outputs import most_held
from greenroom.experts.pack.layout import PackManifest
from greenroom.moe.architecture.moe_layers import MoeLayer
from greenroom.moe.attention.compiled_attention import SCORES_TOGETHER
from greenroom.moe.attention.kv_layout import head_widths
from greenroom.moe.attention.ragged_attention import holds_scores, packs_keys, rows_at_once
from greenroom.moe.batch.batch_config import most_logit_rows
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.policies.base.events import UNKNOWN_TASK
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.expertflow.policy import PATHS
from greenroom.policies.expertflow.t5_paths import CACHE_BYTES
from greenroom.policies.expertflow.token_histories import MOST
from greenroom.policies.registry import policy_class
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.memory_plan import ALLOCATOR_SLACK, Needs

_FLOAT32 = 4


def dense_bytes(model: Any) -> int:
    """Bytes of all weights and buffers that the model holds itself; shared ones count once."""
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())


def needs_of(
    model: Any,
    layers: Sequence[MoeLayer],
    manifest: PackManifest,
    ragged: RaggedModel,
    config: WorkerConfig,
    max_model_len: int,
    profile: ModelProfile | None = None,
    *,
    expanding: int = 0,
) -> Needs:
    """``layers``: the MoE layers. ``max_model_len``: tokens that one request may have. ``profile``: says how many they
    have in the mean. ``expanding``: bytes that are taken to make numbers of an expert's record.
    """
    kv_for_one = ragged.layout.nbytes(max_model_len)
    text = model.config.get_text_config()
    attention = attention_bytes(text, ragged, config, max_model_len)
    itemsize = model.get_input_embeddings().weight.itemsize
    return Needs(
        dense=dense_bytes(model),
        workspace=workspace_bytes(text, layers, manifest, ragged, config)
        + expanding
        + attention
        + foreseeing_bytes(config, itemsize)
        + path_bytes(config, manifest),
        slot_sizes=SlotSizes(catalogue_of(manifest)),
        kv_for_one=kv_for_one,
        kv_for_all=kv_for_one * config.max_running,
        attention=attention,
        chunked=config.make_batch_policy().applies_prefill_chunk,
        kv_expected=kv_expected_bytes(ragged, config, max_model_len, profile),
    )


def kv_expected_bytes(
    ragged: RaggedModel, config: WorkerConfig, max_model_len: int, profile: ModelProfile | None
) -> int:
    """What as many sequences as may run are expected to hold at their ends. 0: not known. On a device they hold all
    that they may need, whatever is expected.
    """
    if profile is None or ragged.device.type != "cpu":
        return 0
    prompts = sum(task.prompts for task in profile.tasks.values())
    read = sum(task.prompts * task.input_tokens.mean for task in profile.tasks.values()) / prompts
    rows = min(max_model_len, math.ceil(read + profile.expected_tokens(UNKNOWN_TASK)))
    return config.max_running * ragged.layout.nbytes(rows)


def foreseeing_bytes(config: WorkerConfig, itemsize: int) -> int:
    """What the given files that picks are foreseen by take in memory, in a model whose numbers have ``itemsize`` bytes.
    A file that can not be read counts nothing here: the start fails where it is read.

    Files are of half precision. Maps of the residual stream become numbers like the model's; a path's weights become
    bytes; the linear layers of an ExpertMLP become single precision.
    """
    factors = {"expert_mlp": 2, "residual": itemsize // 2}
    files = dict(config.artifact_files) | ({} if config.residual is None else {"residual": config.residual})
    found = 0
    for kind, file in files.items():
        with suppress(OSError):
            found += factors.get(kind, 1) * file.stat().st_size
    return found


def path_bytes(config: WorkerConfig, manifest: PackManifest) -> int:
    """What foretelling routing paths takes, beside the file that they are foretold by.

    Counted are a step's chances of each row for all experts, with what they are made of and read into meanwhile, and
    what is remembered of each running sequence: its last tokens and their picks, and averages; a T5's caches.
    """
    if PATHS not in config.artifact_kinds:
        return 0
    experts = manifest.experts
    picks = sum(layer.top_k for layer in manifest.layers)
    remembered = 2 * MOST * (picks * _PICK_BYTES + _TOKEN_BYTES) + 2 * experts * _FLOAT32
    caches = 0
    if config.paths is not None:
        with suppress(InvalidConfig):  # the start fails where it is read
            caches = CACHE_BYTES if PathsFile.read(config.paths).form == T5 else 0
    return _PATH_ARRAYS * config.step_rows * experts * _FLOAT32 + config.max_running * remembered + caches


def workspace_bytes(
    text: Any, layers: Sequence[MoeLayer], manifest: PackManifest, ragged: RaggedModel, config: WorkerConfig
) -> int:
    """An upper bound on what the largest step holds beside weights, KV and attention, in bytes, all as float32.

    Counted are: some tensors of a row's width (residual, norms, queries, keys, values), the contributions of experts,
    the widest hidden layer, and the logits (also as float64 while sampling).
    """
    rows = config.step_rows
    # Of the numbers: a record in codes has panels, units and lines, which say nothing of a width.
    widest = max(max(tensor.shape) for layer in layers for tensor in layer.tensors)
    widest = max(widest, getattr(text, "intermediate_size", 0) or 0)
    numbers = (
        (rows * 12 + contribution_rows(manifest, config)) * text.hidden_size
        + rows * widest * 3
        + most_logit_rows(rows, config.max_running) * ragged.vocab_size * 6
    )
    return int(numbers) * _FLOAT32 + ALLOCATOR_SLACK


def contribution_rows(manifest: PackManifest, config: WorkerConfig) -> int:
    """Rows of experts' outputs that the largest step holds, with what one expert is computed by.

    One expert has at most all rows, as inputs, products and scaled products. Outputs that wait for their turn are those
    of all experts: top-k a row. Under a policy that streams they are fewer in steps with prompts (``HeldOutputs``, and
    one expert more where it holds the only slot), and decoding rows are no more than requests run.
    """
    rows = config.step_rows
    top_k = max(layer.top_k for layer in manifest.layers)
    whole = 3 * top_k
    if "streams" not in policy_class(config.policy, config.policy_options).hooks:
        return rows * whole
    return min(rows * whole, max(4 * rows + most_held(rows), min(rows, config.max_running) * whole))


def attention_bytes(text: Any, ragged: RaggedModel, config: WorkerConfig, keys: int) -> int:
    """What the attention of a step takes, in bytes, where each chunk ends a sequence of ``keys`` tokens.

    Counted are: the masks of all chunks, and what one mask is made of; one chunk's keys and values for all heads, where
    latent attention computes them. Of the compiled attention: each thread's scores. Of torch's: keys and values for all
    heads, since sdpa under a mask and eager attention copy them to every head that shares them; the copies that its
    fast kernel packs for AMX (``packs_keys``); scores, where they are held (``holds_scores``), of as many rows as
    attend at once.
    """
    rows = config.step_rows
    chunk = config.prompt_rows
    itemsize = ragged.layout.dtype.itemsize
    heads = int(text.num_attention_heads)
    key_dim, value_dim = max(head_widths(text, ragged.layout), key=sum)
    latent = getattr(text, "kv_lora_rank", None) is not None and hasattr(text, "v_head_dim")
    eager = ragged.attention == "eager" or getattr(text, "attn_logit_softcapping", None) is not None
    masks = rows + chunk * (_MASK_PARTS + itemsize)
    expanded = (2 * key_dim + value_dim) * itemsize if latent else 0
    if ragged.attention_compiled:
        if latent:
            expanded += (key_dim + value_dim) * itemsize  # in the order of the kernel
        sharing = 1 if latent else heads // min(layer.key_heads for layer in ragged.layout.layers)
        scores = torch.get_num_threads() * max(keys * sharing, SCORES_TOGETHER) * _FLOAT32
        return int(keys * (masks + heads * expanded) + scores)
    shared = not latent and heads != max(ragged.layout.layers, key=lambda layer: layer.elements).key_heads
    copied = expanded + (key_dim + value_dim) * itemsize * shared
    held = holds_scores(eager, key_dim, value_dim)
    if held and not eager:  # sdpa without its fast kernel: all in float32, the keys scaled as well
        copied += (2 * key_dim + value_dim) * _FLOAT32
    if not held and packs_keys(ragged.device, itemsize):
        copied += (key_dim + value_dim) * itemsize
    at_once = rows_at_once(chunk, keys, heads, itemsize) if held else 0
    return int(keys * (masks + rows * itemsize * eager + heads * (copied + at_once * _BYTES_A_SCORE)))


_PICK_BYTES, _TOKEN_BYTES = 4, 9
"""A pick's key, at most; a token's id, and whether its picks are known."""

_PATH_ARRAYS = 8
"""Of a row's chances: themselves, the averages over its earlier tokens (2), their logits, and what the policy makes of
these for a step (4)."""

_MASK_PARTS = 4
"""Bytes for a row and a key while a mask is made of the family's conditions."""

_BYTES_A_SCORE = 3 * _FLOAT32
"""In bf16 and fp32 alike: the softmax's input and output in fp32, and the scores. gpt-oss takes half of it in bf16."""
