"""``greenroom generate``: prompts in, completions out, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from greenroom.cli.model_options import model_options, worker_config
from greenroom.cli.prompts import Prompt, read_prompts


@click.command()
@click.argument("prompts", nargs=-1)
@click.option(
    "--file",
    "-f",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Prompts from a file, one a line: text, or JSON with a field `prompt` or `messages`; - is stdin.",
)
@click.option("--raw", is_flag=True, help="Complete the text as it is, without the chat template.")
@click.option("--system", help="A system message for every prompt.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens of an answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0 is off.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="End the answer at this string; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt, in the order of the prompts.")
@model_options
def generate(
    prompts: tuple[str, ...],
    file: Path | None,
    raw: bool,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Answer PROMPTS: from arguments, from a file, or from stdin.

    All prompts run at once, batched. Through the model's chat template if it has one and --raw is not given.

    \b
    Examples:
      greenroom generate "Rosa always asks for milk. Kira drinks cocoa. What does Kira drink?"
      greenroom generate --file prompts.jsonl --json --expert-memory 25% > answers.jsonl
      greenroom generate --file prompts.jsonl --expert-memory 25% --batching phases --tokens-per-step auto
      echo "Once upon a time" | greenroom generate --raw --model ./checkpoint --temperature 0.8 --seed 7
    """
    from greenroom.core.generation import SamplingParams

    asked = [Prompt(text) for text in prompts] + (read_prompts(file) if file is not None or not prompts else [])
    if not asked:
        raise click.UsageError("no prompts: give them as arguments, with --file, or on stdin")
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, max_tokens=max_tokens
    )
    config = worker_config(options)

    from greenroom.llm import LLM  # torch takes seconds: what can be refused without it, was

    with LLM(config=config) as llm:
        click.echo(llm.worker.describe(), err=True)
        if raw or not llm.worker.text.has_chat:
            answers = llm.generate([prompt.text() for prompt in asked], sampling, progress=config.progress)
        else:
            answers = llm.chat([prompt.conversation(system) for prompt in asked], sampling, progress=config.progress)
    for prompt, answer in zip(asked, answers, strict=True):
        if as_json:
            record = {
                "prompt": prompt.content,
                "text": answer.text,
                "finish_reason": answer.finish_reason.value,
                "prompt_tokens": len(answer.prompt_token_ids),
                "completion_tokens": len(answer.token_ids),
                "approximated": round(answer.approximated, 6),
            }
            click.echo(json.dumps(record, ensure_ascii=False))
        else:
            click.echo(answer.text if len(asked) == 1 else f"> {prompt.last}\n{answer.text}\n")
    shares = [answer.approximated for answer in answers]
    if any(shares):
        mean = sum(shares) / len(shares)
        click.echo(
            f"approximated: {mean:.2%} of the routing (mean of the answers, at most {max(shares):.2%}) went to experts "
            f"that were in memory instead of those that the router picks (--fidelity {config.fidelity})",
            err=True,
        )
