"""What a worker announces of its collaboration."""

from __future__ import annotations

import hashlib
import time

from greenroom.coe.loading.expert_checkpoint import Task
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.core.collaboration import CollaborationCard, InputKind, OutputKind
from greenroom.core.messages import ModelCard
from greenroom.worker.inference_engine import model_card

_GIVES = {
    Task.IMAGE_CLASSIFICATION: (OutputKind.LABEL, OutputKind.SCORE, OutputKind.SCORES),
    Task.TEXT_CLASSIFICATION: (OutputKind.LABEL, OutputKind.SCORE, OutputKind.SCORES),
    Task.OBJECT_DETECTION: (OutputKind.LABEL, OutputKind.SCORE, OutputKind.SCORES, OutputKind.BOXES),
    Task.EMBEDDING: (OutputKind.EMBEDDING,),
}


def card_of(runtime: CollaborationRuntime, name: str | None = None) -> ModelCard:
    """``name``: in the API; None: the definition's. Workers with equal digests give equal answers, but for rounding."""
    collaboration, manifest = runtime.collaboration, runtime.pack.manifest
    whole = hashlib.blake2b(digest_size=16)
    for part in (collaboration.file.read_text(), manifest.dtype, manifest.source_digest):
        whole.update(f"{len(part)} {part}\n".encode())
    for expert in collaboration.experts:
        for path in sorted(expert.folder.glob("*.json")):
            whole.update(path.name.encode() + path.read_bytes())
    gives = {OutputKind.PATH, *(kind for expert in collaboration.experts for kind in _GIVES[expert.task])}
    router = collaboration.definition.router
    card = CollaborationCard(
        takes=tuple(InputKind(kind) for kind in sorted({str(expert.takes) for expert in collaboration.experts})),
        parameter=router.parameter or "" if router.expert is None else "",
        values=collaboration.graph.values if router.expert is None else (),
        gives=tuple(kind for kind in OutputKind if kind in gives),
        max_pixels=runtime.max_pixels,
    )
    return model_card(name or collaboration.name, whole.hexdigest(), card, created=int(time.time()))
