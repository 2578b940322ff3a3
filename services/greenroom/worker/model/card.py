"""A worker's model card: what gateways and schedulers are told of its model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.core.messages import ModelCard
from greenroom.text.digest import text_digest
from greenroom.worker.model.model_runtime import ModelRuntime

_SAMPLE_BYTES = 4096
_SAMPLES = 4


def card_of(worker: ModelRuntime) -> ModelCard:
    """What ``worker`` serves. Workers with equal digests give equal answers, but for rounding.

    Weights that stay as they are stored are not rounded to the model's dtype. The difference is that of another copy
    of the model: so experts that are kept otherwise have another digest, by their pack's, and dense weights as well.
    """
    served, manifest = worker.served, worker.pack.manifest
    text = text_digest(worker.checkpoint.folder)
    whole = hashlib.blake2b(digest_size=16)
    for part in (manifest.model_type, manifest.dtype, manifest.source_digest, text, *worker.dense_formats):
        whole.update(f"{part}\n".encode())
    dense = [tensor for name, tensor in sorted(worker.checkpoint.tensors.items()) if ".experts." not in name]
    whole.update(sampled(dense))
    return ModelCard(
        name=served.name,
        digest=whole.hexdigest(),
        text_digest=text,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
        eos_token_ids=served.eos_token_ids,
        kv_bytes_per_token=worker.loop.engine.kv.layout.bytes_per_token,
        created=served.created,
    )


def sampled(tensors: Iterable[StoredTensor]) -> bytes:
    """A digest of the tensors' names, types and shapes, and of a few parts of each. Training or merging changes these
    parts; reading every byte at every start would take long."""
    digest = hashlib.blake2b(digest_size=16)
    files: dict[os.PathLike[str], int] = {}
    try:
        for tensor in tensors:
            digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
            if tensor.shard not in files:
                files[tensor.shard] = os.open(tensor.shard, os.O_RDONLY)
            last = max(0, tensor.nbytes - _SAMPLE_BYTES)
            for place in sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)}):
                count = min(_SAMPLE_BYTES, tensor.nbytes - place)
                digest.update(os.pread(files[tensor.shard], count, tensor.offset + place))
    finally:
        for file in files.values():
            os.close(file)
    return digest.digest()
