"""Running prompts and writing down their routing, for every command that wants it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from greenroom.cli.prompts import Prompt
from greenroom.core.errors import InvalidRequest

if TYPE_CHECKING:
    from greenroom.core.generation import Finished, GenerationRequest, SamplingParams
    from greenroom.experts.pack.layout import PackManifest
    from greenroom.moe.batch.completions import Completion
    from greenroom.moe.routing.row_recorder import Rows
    from greenroom.replay import RoutingTrace, TraceRecorder
    from greenroom.worker.model.model_runtime import ModelRuntime

Asked = tuple[Prompt, "GenerationRequest"]


def record(worker: ModelRuntime, asked: Sequence[Asked]) -> tuple[RoutingTrace, list[Completion]]:
    """Each token's routing, and the answers, in the order of ``asked``; with a progress bar where one is seen."""
    from greenroom.replay import TraceRecorder

    recorder = worker.experts.listener = TraceRecorder(worker.experts.catalogue)
    answers = _answered(worker, asked)
    worker.experts.listener = None
    return _trace_of(worker, recorder, asked), answers


def record_rows(worker: ModelRuntime, asked: Sequence[Asked]) -> tuple[RoutingTrace, Rows]:
    """Each token's routing, and ``[T, layers, H]``: the rows that the layers' routers got."""
    from greenroom.moe.routing.row_recorder import RowRecorder, recording

    recorder = RowRecorder(worker.experts.catalogue)
    with recording(worker.hooks, worker.experts, recorder):
        _answered(worker, asked)
    if recorder.is_full:
        click.echo(f"only the first {recorder.tokens:,} tokens were kept: more take too much memory", err=True)
    return _trace_of(worker, recorder, asked), recorder.rows()


def _answered(worker: ModelRuntime, asked: Sequence[Asked]) -> list[Completion]:
    from tqdm import tqdm

    from greenroom.moe.batch.completions import complete

    shown = sys.stderr.isatty() if worker.config.progress is None else worker.config.progress
    with tqdm(total=len(asked), desc="recording", unit="prompt", disable=not shown) as bar:

        def finished(place: int, end: Finished) -> None:
            bar.update()

        return complete(worker.loop, [request for _, request in asked], on_finished=finished)


def _trace_of(worker: ModelRuntime, recorder: TraceRecorder, asked: Sequence[Asked]) -> RoutingTrace:
    trace = recorder.trace(model=worker.served.name, layer_ids=_layer_ids(worker.pack.manifest))
    return replace(trace, request=tuple(request.request_id for _, request in asked))


def requests_of(
    worker: ModelRuntime,
    prompts: list[Prompt],
    sampling: SamplingParams,
    *,
    raw: bool,
    system: str | None,
    skip_too_long: bool,
) -> list[tuple[Prompt, GenerationRequest]]:
    """Tokenised; a prompt's own id, or its place in the file, names its request. Raises InvalidRequest."""
    from greenroom.core.generation import GenerationRequest

    text, tokenizer = worker.text, worker.text.tokenizer
    asked, left_out = [], 0
    for place, prompt in enumerate(prompts):
        if raw or not text.has_chat:
            ids = tokenizer.encode(prompt.text(), add_special_tokens=True)
        else:
            ids = tokenizer.encode(text.chat.render(prompt.conversation(system)), add_special_tokens=False)
        request = GenerationRequest(prompt.name or str(place), tuple(ids), sampling, prompt.task)
        try:
            worker.loop.engine.admit_check(request)
        except InvalidRequest as error:
            if not skip_too_long or error.code != "context_length_exceeded":
                raise InvalidRequest(f"prompt {place + 1}: {error}", param=error.param, code=error.code) from error
            left_out += 1
            continue
        asked.append((prompt, request))
    if left_out:
        click.echo(f"{left_out} of {len(prompts)} prompts are too long and were left out", err=True)
    if not asked:
        raise InvalidRequest("none of the prompts fits the model")
    return asked


def _layer_ids(manifest: PackManifest) -> list[int] | None:
    """The number of each MoE layer's block in the model; None where the modules' names do not tell."""
    numbers = [[int(part) for part in layer.name.split(".") if part.isdigit()] for layer in manifest.layers]
    return [number for (number,) in numbers] if all(len(found) == 1 for found in numbers) else None
