"""Token streams that are forced on every arm, so that all compute the same and route alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from benchmarks.peers.batch import Batch
from greenroom.core.generation import FinishReason, GenerationRequest, Token
from greenroom.demo.tasks import TASKS, sample
from greenroom.demo.tokenizer import SPECIAL_TOKENS, render
from greenroom.moe.batch import sequence as moe_sequence
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.sampling import SampledToken

SEED = 11


def conversations(checkpoint: Path, sequences: int, *, prompt_tokens: int, tokens: int) -> Batch:
    """Conversations over the bundled model's tasks: questions and their right answers in turn, as long as needed.

    On such text the model routes as it was trained to. The first ``prompt_tokens`` are the prompt.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    streams: list[tuple[int, ...]] = []
    for number in range(sequences):
        turns: list[tuple[str, str]] = []
        ids: list[int] = []
        while len(ids) < prompt_tokens + tokens:
            task = TASKS[(number + len(turns) // 2) % len(TASKS)]
            drawn = sample(task, seed=SEED, index=1000 * number + len(turns))
            turns += [("user", drawn.prompt), ("assistant", drawn.answer)]
            ids = tokenizer.encode(render(turns, generation_prompt=False), add_special_tokens=False).ids
        streams.append(tuple(ids[: prompt_tokens + tokens]))
    return _split(streams, prompt_tokens)


def random_tokens(checkpoint: Path, sequences: int, *, prompt_tokens: int, tokens: int) -> Batch:
    """Random tokens, for a model of random weights: routing as good as random, the worst case for a cache."""
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    random = Random(SEED)
    lowest = len(SPECIAL_TOKENS)
    streams = [
        tuple(random.randrange(lowest, vocabulary) for _ in range(prompt_tokens + tokens)) for _ in range(sequences)
    ]
    return _split(streams, prompt_tokens)


def _split(streams: Sequence[tuple[int, ...]], prompt_tokens: int) -> Batch:
    prompts = tuple(stream[:prompt_tokens] for stream in streams)
    return Batch(prompts, tuple(stream[prompt_tokens:] for stream in streams))


class ForcedSequence(moe_sequence.Sequence):
    """A request that is given its tokens; ``greedy`` is what was picked in their place."""

    __slots__ = ("forced", "greedy")

    def __init__(self, ordinary: moe_sequence.Sequence, forced: Sequence[int]) -> None:
        super().__init__(
            ordinary.number,
            ordinary.request,
            ordinary.on_event,
            limit=len(forced),
            eos_token_ids=frozenset(),
            checker=None,
            now=ordinary.submitted_at,
        )
        self.forced = forced
        self.greedy: list[int] = []

    def accept(self, picked: SampledToken) -> tuple[Token, FinishReason | None]:
        self.greedy.append(picked.token_id)
        return super().accept(SampledToken(self.forced[self.generated], picked.logprobs))


def force(engine: BatchEngine, forced: Mapping[str, Sequence[int]]) -> dict[str, ForcedSequence]:
    """From now on requests with these ids get these tokens; returns their sequences, filled as they come."""
    ordinary = engine.new_sequence
    found: dict[str, ForcedSequence] = {}

    def new_sequence(request: GenerationRequest, on_event: moe_sequence.OnEvent) -> moe_sequence.Sequence:
        sequence = ordinary(request, on_event)
        if request.request_id not in forced:
            return sequence
        found[request.request_id] = ForcedSequence(sequence, forced[request.request_id])
        return found[request.request_id]

    engine.new_sequence = new_sequence  # type: ignore[method-assign]
    return found
