"""``greenroom paths``: the tables by which the policy expertflow foretells picks from tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.numbers import SEED, NumberRange
from greenroom.cli.option_stack import without
from greenroom.cli.recorded_sources import Recorded, check_source, recorded_of, source_options, write_artifact
from greenroom.core.artifacts.paths_file import LARGEST_VOCABULARY

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from greenroom.core.artifacts.paths_file import PathsFile
    from greenroom.core.artifacts.reuse_file import ReuseFile
    from greenroom.predictor.kinds.paths.fit import FitOptions
    from greenroom.replay import RoutingTrace


@click.group()
def paths() -> None:
    """The tables of --policy expertflow: from tokens, before a forward (`path`: from a token's earlier layers)."""


@paths.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("paths.safetensors"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--reuse",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What is known of each token's sequence, a file of `greenroom reuse fit`.  [default: fitted first]",
)
@click.option(
    "--held-out",
    type=NumberRange(min=0, max=0.9, min_open=True),
    default=0.1,
    show_default=True,
    help="The share of the sequences that are not learnt from, the last ones. The report is about them.",
)
@click.option(
    "--form",
    type=click.Choice(["tables", "t5", "best"]),
    default="tables",
    show_default=True,
    help="Tables of tokens; a small T5, as ExpertFlow has it (needs torch); or both, and the better is kept.",
)
@click.option("--max-bytes", default="64MiB", show_default=True, help="What the tables may take.")
@click.option(
    "--vocabulary",
    type=click.IntRange(min=1, max=LARGEST_VOCABULARY),
    help="Token ids of the model.  [default: those of the traces]",
)
@click.option(
    "--least-sequences",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Leave out tokens, and pairs and triples of them, that fewer sequences have. At 1 whoever has the file can "
    "read the traces' texts out of it; give 5 where they are other people's.",
)
@click.option("--seconds", type=NumberRange(min=0), help="Time that it may take.  [default: as long as it takes]")
@click.option("--seed", type=SEED, default=0, show_default=True, help="The same sequences and seed give the same.")
@without("reuse")
@source_options
def fit(
    out: Path,
    reuse: Path | None,
    held_out: float,
    form: str,
    max_bytes: str,
    vocabulary: int | None,
    least_sequences: int,
    seconds: float | None,
    seed: int,
    **options: Any,
) -> None:
    """Fit, to many sequences' routing, what a row's token and those before it say of its picks in all layers.

    They are tables of tokens, pairs and triples of tokens, weighed in each layer against what the sequence has picked
    so far. Or a T5: its encoder reads the prompt, its decoder the tokens, and each layer has a head. A trace needs the
    tokens of its rows: an array `token`, or `decode_tokens` in the .meta.jsonl beside it. MODEL, a folder or a hub id,
    is what runs the prompts, as --model is; without either it is the bundled model. A trace, NAME.npz, may stand in its
    place.

    \b
    Examples:
      greenroom paths fit --prompts prompts.jsonl
      greenroom paths fit ./checkpoint --prompts prompts.txt --out ./checkpoint/paths.safetensors
      greenroom paths fit monday.npz
      greenroom paths fit --trace monday.npz --trace tuesday.npz --held-out 0.33
      greenroom paths fit --trace monday.npz --form best
      greenroom paths show paths.safetensors
    """
    from greenroom.core.artifacts.reuse_file import ReuseFile
    from greenroom.core.errors import InvalidConfig
    from greenroom.core.units import parse_bytes
    from greenroom.predictor.kinds.paths.fit import FitOptions
    from greenroom.replay.traces.token_numbers import texts_digest

    if (named := options["named"]) is not None and named.endswith(".npz"):
        options["traces"], options["named"] = (Path(named), *options["traces"]), None
    check_source(options, out)
    known = None if reuse is None else ReuseFile.read(reuse)  # refused before the prompts have run
    files: tuple[Path, ...] = options["traces"]
    recorded = recorded_of(options, tokens=True)
    for number, trace in enumerate(recorded.traces):
        if trace.token is None:
            of = f"{files[number]}, " if files else ""
            allowed = (
                "routing with the tokens of its rows (`greenroom trace --tokens` records them): an array token, or "
                "decode_tokens in a .meta.jsonl beside it"
            )
            raise InvalidConfig("trace", f"{of}one without tokens", allowed)
    chosen = FitOptions(held_out, parse_bytes(max_bytes, field="max-bytes"), vocabulary, seed, seconds, least_sequences)
    made = _fitted(form, recorded, files, known, chosen)
    write_artifact(made, out)
    click.echo(f"{out}: {_said(made)}")
    if made.numbered_texts and made.numbered_texts not in map(texts_digest, recorded.traces):
        click.echo("  The texts of several traces are numbered together: it is for replays of none of them alone.")


@paths.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """What is in FILE.

    \b
    Example:
      greenroom paths show paths.safetensors
    """
    from greenroom.core.artifacts.paths_file import PathsFile

    found = PathsFile.read(file)
    if as_json:
        click.echo(
            json.dumps(
                {
                    **found.report,
                    "model": found.model, "sequences": found.sequences, "experts_per_layer": found.experts_per_layer,
                    "version": found.version, "created_ms": found.created_ms, "form": found.form,
                    "vocabulary": found.vocabulary,
                }
            )
        )  # fmt: skip
        return
    click.echo(f"{file}: {_said(found)}")
    for line in _reported(found.report):
        click.echo(f"  {line}")


_KNOWING = {
    "popularity": "how often each expert is picked",
    "token": "the token's own table",
    "alone": "the network",
    "tokens": "all tables",
    "past": "these and the sequence's past",
    "picks": "these and the picks of its earlier rows",
}


def _reported(report: Mapping[str, Any]) -> Iterator[str]:
    """Of whatever report a file has: it is free JSON, which nothing checks."""
    left_out = _named(report, "left_out")
    for name, rows in _named(report, "rows").items():
        yield f"{name.replace('_', ' ')}: {_count(rows)} rows, {_count(left_out.get(name))} left out"
    for name, recall in _named(report, "recall").items():
        yield f"picks foreseen, held out, by {_KNOWING.get(name, name)}: {_share(recall)}"
    for name, recall in _named(report, "other_recall").items():
        yield f"the other form, {report.get('other')}, foresees by {_KNOWING.get(name, name)}: {_share(recall)}"


def _named(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = report.get(name)
    return found if isinstance(found, dict) else {}


def _count(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else "an unknown number of"


def _share(number: object) -> str:
    return f"{number:.1%}" if isinstance(number, int | float) and 0 <= number <= 1 else "unknown"


def _fitted(
    form: str, recorded: Recorded, files: Sequence[Path], reuse: ReuseFile | None, options: FitOptions
) -> PathsFile:
    import time
    from dataclasses import replace

    from tqdm import tqdm

    from greenroom.predictor.kinds.paths.fit import REUSE_SHARE
    from greenroom.predictor.kinds.paths.forms import fit_form
    from greenroom.predictor.kinds.reuse.fit import FitOptions as ReuseOptions
    from greenroom.predictor.kinds.reuse.fit import fit as fit_reuse
    from greenroom.replay.traces.join import joined

    began, trace = time.monotonic(), joined(recorded.traces)
    prompts = None if form == "tables" else _prompts(recorded, files, trace, options.held_out)
    passes = 2 if reuse is None else 1
    with tqdm(total=passes * trace.layers, desc="fitting", unit="layer", disable=not sys.stderr.isatty()) as bar:
        if reuse is None:
            of_reuse = None if options.seconds is None else REUSE_SHARE * options.seconds
            reuse = fit_reuse(
                trace, ReuseOptions(seed=options.seed, seconds=of_reuse, held_out=options.held_out),
                on_layer=lambda _: bar.update(),
            )  # fmt: skip
        if options.seconds is not None:
            options = replace(options, seconds=max(0.0, options.seconds - (time.monotonic() - began)))
        before = (passes - 1) * trace.layers
        made = fit_form(
            form, trace, reuse, options, prompts=prompts,
            on_share=lambda share: bar.update(before + round(share * trace.layers) - bar.n),
        )  # fmt: skip
    return replace(made, model=recorded.model)


def _prompts(
    recorded: Recorded, files: Sequence[Path], trace: RoutingTrace, held_out: float
) -> list[NDArray[np.int64]] | None:
    """Of all sequences, where files tell them as texts; None: rows of the trace are all that is known of them."""
    from greenroom.predictor.kinds.paths.prompt_texts import prompts_beside, prompts_of
    from greenroom.replay.traces.held_out import sequences_to_learn_from

    if trace.token_texts is None:
        return None
    found: list[str] = []
    for path, one in zip(files, recorded.traces, strict=True):
        found += prompts_beside(path, one.sequences) or [""] * one.sequences
    return prompts_of(trace, sequences_to_learn_from(trace, held_out, least=0), found)


def _said(found: PathsFile) -> str:
    from greenroom.core.units import format_bytes

    of = f" of {found.model}" if found.model else ""
    size = sum(one.nbytes for one in found.tensors.values())
    only = ", of numbered texts: for replays of the trace that it was made of only" if found.numbered_texts else ""
    return f"{found.form}, {format_bytes(size)}, fitted to {found.sequences} sequences{of}, {found.shape}{only}"
