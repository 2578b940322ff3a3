"""``greenroom trace``: run prompts and write down which experts they were routed to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.model_options import model_options, worker_config
from greenroom.cli.prompts import Prompt, read_prompts
from greenroom.cli.recording import record, requests_of
from greenroom.core.files import write_whole

if TYPE_CHECKING:
    from greenroom.core.generation import GenerationRequest
    from greenroom.moe.batch.completions import Completion
    from greenroom.worker.model.model_runtime import ModelRuntime


@click.command()
@click.option(
    "--prompts",
    "file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="One prompt a line: text, or JSON with a field `prompt` or `messages`, and `task` and `id`; - is stdin.",
)
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The trace to write, an .npz file."
)
@click.option("--max-tokens", default=128, show_default=True, help="Most tokens of an answer.")
@click.option("--concurrency", default=8, show_default=True, help="Sequences at once; sets --max-running.")
@click.option("--raw", is_flag=True, help="Complete the text as it is, without the chat template.")
@click.option("--system", help="A system message for every prompt.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--skip-too-long", is_flag=True, help="Leave out prompts that the model can not take, and say how many.")
@click.option(
    "--tokens",
    is_flag=True,
    help="Record each row's token too: the text of prompts and answers, as numbers. `greenroom paths fit` takes them.",
)
@click.option("--meta", is_flag=True, help="Write prompts and answers beside the trace, as JSON Lines.")
@model_options
def trace(
    file: Path,
    out: Path,
    max_tokens: int,
    concurrency: int,
    raw: bool,
    system: str | None,
    temperature: float,
    seed: int | None,
    skip_too_long: bool,
    tokens: bool,
    meta: bool,
    **options: Any,
) -> None:
    """Generate answers to prompts and record each token's routing, for `greenroom replay`.

    The routing does not depend on the expert memory or the policy: record on any machine that can run the model.
    Without --tokens and --meta there is no text in what is written.

    \b
    Examples:
      greenroom trace --prompts prompts.jsonl --out understudy.npz
      greenroom trace --model ./checkpoint --prompts prompts.txt --out t.npz --max-tokens 256 --concurrency 1
      greenroom trace --prompts prompts.jsonl --out t.npz --tokens && greenroom paths fit --trace t.npz
      head -50 prompts.jsonl | greenroom trace --prompts - --out t.npz --meta --expert-memory 25%
    """
    from greenroom.core.generation import FinishReason, SamplingParams
    from greenroom.core.units import format_bytes
    from greenroom.replay.traces.meta_file import meta_beside

    if out.suffix != ".npz":
        raise click.BadParameter("a trace is an .npz file", param_hint="--out")
    if not out.parent.is_dir():
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    prompts = read_prompts(file)
    if not prompts:
        raise click.UsageError("no prompts in the file")
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    options["max_running"] = concurrency
    config = worker_config(options)

    # torch takes seconds: what can be refused without it, was.
    from greenroom.worker.model.model_runtime import ModelRuntime

    with ModelRuntime(config) as worker:
        click.echo(worker.describe(), err=True)
        asked = requests_of(worker, prompts, sampling, raw=raw, system=system, skip_too_long=skip_too_long)
        trace, answers = record(worker, asked)
        texts = [_text(worker, answer) for answer in answers] if meta else []
    (trace if tokens else replace(trace, token=None)).save(out)
    if meta:
        _write_meta(meta_beside(out), asked, answers, texts)
    failed = [answer.finished.error for answer in answers if answer.finished.reason is FinishReason.FAILED]
    if failed:
        click.echo(f"{len(failed)} of {len(answers)} failed, the first because: {failed[0]}", err=True)
    click.echo(
        f"{out}: {trace.tokens} tokens of {trace.sequences} sequences, {trace.layers} MoE layers, "
        f"{format_bytes(out.stat().st_size)}{', with the texts as tokens' if tokens else ''}"
    )


def _text(worker: ModelRuntime, answer: Completion) -> str:
    ids = [token for token in answer.token_ids if token not in worker.served.eos_token_ids]
    return worker.text.tokenizer.decode(ids)


def _write_meta(
    path: Path, asked: list[tuple[Prompt, GenerationRequest]], answers: list[Completion], texts: list[str]
) -> None:
    """Line i is sequence i of the trace."""
    lines = [
        json.dumps(
            {
                "request": request.request_id,
                "task": prompt.task,
                "prompt": prompt.content,
                "text": text,
                "tokens": len(answer.token_ids),
                "finish_reason": answer.finished.reason.value,
            },
            ensure_ascii=False,
        )
        for (prompt, request), answer, text in zip(asked, answers, texts, strict=True)
    ]
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())
