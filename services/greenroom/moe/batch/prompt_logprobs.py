"""The log-probabilities of a prompt's own tokens, each behind those before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from greenroom.core.generation import TokenLogprobs
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.logit_changes import InvalidLogits
from greenroom.moe.batch.sequence import Sequence
from greenroom.moe.kernels.device_copies import to_device


def prompt_logprobs(logits: torch.Tensor, following: Items[int], top: int) -> list[TokenLogprobs]:
    """Of the tokens ``following[n]`` by ``logits[n, vocabulary]``, with the ``top`` most likely in their place.

    Computed as the sampler does for generated tokens. Waits for the device once. Raises InvalidLogits for a row without
    usable logits.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, to_device(torch.tensor(following), logits.device)[:, None])
    best = logprobs.topk(min(max(top, 1), logprobs.shape[1]), dim=1)
    rows = torch.cat([chosen.double(), best.indices.double(), best.values.double()], dim=1).tolist()
    found = []
    for own, *pairs in rows:
        ids, values = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        if own != own or values[0] != values[0]:
            raise InvalidLogits("the model computed no usable logits for a token of the prompt")
        found.append(TokenLogprobs(own, tuple(zip(map(int, ids), values, strict=True)) if top else ()))
    return found


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """One chunk's rows of logits, ``[start, stop)`` of all. The first ``scored`` are of the prompt's tokens.

    ``samples``: the last one is for the next token of the answer.
    """

    start: int
    stop: int
    scored: int
    samples: bool

    def logprobs(self, sequence: Sequence, logits: torch.Tensor) -> list[TokenLogprobs]:
        """Of the prompt's tokens behind the scored rows. Raises InvalidLogits."""
        if not self.scored:
            return []
        first = sequence.scores_from
        following = sequence.tokens[first + 1 : first + 1 + self.scored]
        top = sequence.request.sampling.prompt_logprobs or 0
        return prompt_logprobs(logits[self.start : self.start + self.scored], following, top)


def scored_parts(chunks: Iterable[tuple[Sequence, Chunk]]) -> Iterator[tuple[Sequence, ScoredPart]]:
    """Of chunks that wanted logits and have run, in their order in the forward."""
    stop = 0
    for sequence, chunk in chunks:
        start, stop = stop, stop + chunk.logit_rows
        ran = chunk.kv.length
        scored = max(0, min(ran, sequence.scored_rows) - max(ran - chunk.logit_rows, sequence.scores_from))
        yield sequence, ScoredPart(start, stop, scored, samples=ran == len(sequence.tokens))
