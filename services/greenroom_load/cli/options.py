"""Options that `run` and `sweep` share, and what they say together."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom_load.arrivals import Arrivals, AtOnce, Constant, Gamma, Poisson, Trace
from greenroom_load.lengths import LONGEST, Lengths
from greenroom_load.mix import ShiftingMix, TaskMix
from greenroom_load.plan import Bounds, Plan
from greenroom_load.prompts import FilePrompts, Prompts, TemplatedPrompts
from greenroom_load.targets import Targets, TargetsByTask
from greenroom_load.traces import read_trace

if TYPE_CHECKING:
    from greenroom_load.session import Session
    from greenroom_load.transport import Style

Command = TypeVar("Command", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e]*)")

_OPTIONS = (
    # the server
    click.option("--url", default="http://127.0.0.1:8000", show_default=True,
                 help="Where the server is: http://, https://, grpc:// or grpcs:// with host and port."),
    click.option("--model", help="The model's name.  [default: the one that the server has]"),
    click.option("--api", type=click.Choice(["chat", "completions"]), default="chat", show_default=True,
                 help="Which of OpenAI's APIs is used over HTTP; over gRPC, whether the chat template is."),
    click.option("--api-key", help="Bearer key. It never gets into reports."),
    click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="A further header of all requests."),
    click.option("--ca-file", type=_FILE, help="PEM certificates to judge the server's by, instead of the system's."),
    click.option("--extra-body", metavar="JSON", help="Further fields of all request bodies (HTTP)."),
    click.option("--ready-timeout", type=click.FloatRange(min=0), default=60.0, show_default=True,
                 help="Seconds to wait until the server is ready; 0 does not ask."),
    # arrivals
    click.option("--arrivals", type=click.Choice(["poisson", "gamma", "constant", "trace"]),
                 help="How requests arrive.  [default: poisson; trace with --trace, gamma with --burstiness]"),
    click.option("--burstiness", type=float, help="Shape of gamma-distributed gaps: below 1 in bursts, 1 is Poisson."),
    click.option("--trace", type=_FILE,
                 help="CSV of recorded arrivals: TIMESTAMP,ContextTokens,GeneratedTokens (the Azure traces)."),
    click.option("--time-scale", type=float, help="Multiplies the trace's gaps: 0.1 is ten times as fast."),
    click.option("--num-requests", type=click.IntRange(min=1), help="How many requests at most."),
    click.option("--duration", type=float, help="Seconds for which requests are sent."),
    click.option("--max-concurrency", type=click.IntRange(min=1),
                 help="Closed loop: so many in flight at most, the others wait here.  [default: open loop]"),
    click.option("--max-outstanding", type=click.IntRange(min=1), default=10_000, show_default=True,
                 help="In the open loop, requests in flight beyond which more count as not sent."),
    # prompts
    click.option("--prompts", "prompt_file", type=_FILE,
                 help="JSONL with prompt or messages, and if known task_type, id, expected, max_tokens.  "
                      "[default: templated prompts with known answers]"),
    click.option("--task-mix", metavar="TASK=WEIGHT,...", help="Task types drawn from.  [default: all that there are]"),
    click.option("--task-mix-to", metavar="TASK=WEIGHT,...", help="The mix at the end, towards which it moves evenly."),
    click.option("--input-len", metavar="LENGTHS",
                 help="Make templated prompts about so many tokens long by earlier turns: fixed:N, uniform:A,B, "
                      "normal:MEAN,STD, lognormal:MEDIAN,SIGMA, exponential:MEAN, trace."),
    click.option("--output-len", metavar="LENGTHS", default="fixed:64", show_default=True,
                 help="Limit of each reply's tokens, drawn in the same ways; with --ignore-eos its length."),
    click.option("--ignore-eos", is_flag=True, help="Have replies go on to their limit."),
    click.option("--length-scale", type=float, default=1.0, show_default=True, help="Multiplies the trace's lengths."),
    click.option("--max-input-len", type=click.IntRange(min=1), help="Longest prompt with --input-len."),
    click.option("--max-output-len", type=click.IntRange(min=1), help="Longest limit with --output-len."),
    click.option("--tokens-per-word", type=float, default=1.3, show_default=True,
                 help="How --input-len is turned into words; the report has the true counts."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="Sampling; 0 is greedy."),
    # what is hoped for
    click.option("--slo", "slos", multiple=True, metavar="[TASK=]TARGETS",
                 help="A task type's SLO in ms, such as question=ttft:200,tpot:50,e2e:2000; without a name, of all "
                      "others. May be given several times."),
    click.option("--send-slo", type=click.Choice(["headers", "fields"]),
                 help="Tell the server each request's SLO: x-slo-ttft-ms and so on, or the field slo.  [default: no]"),
    click.option("--send-task-type", is_flag=True, help="Tell the server each request's task type."),
    click.option("--goodput", "goodputs", multiple=True, metavar="TARGETS",
                 help="Count requests within these, in ms: ttft:200 tpot:50 e2el:2000."),
    # the run
    click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals, tasks, lengths and prompts."),
    click.option("--warmup-requests", type=click.IntRange(min=0), default=5, show_default=True,
                 help="Sent first; their figures are not counted."),
    click.option("--request-timeout", type=float, default=600.0, show_default=True, help="Seconds for one request."),
    click.option("--drain-timeout", type=float, default=60.0, show_default=True,
                 help="Seconds that the last replies are waited for."),
    click.option("--progress/--no-progress", "shown", default=None,
                 help="A line with what is going on.  [default: on a terminal]"),
    click.option("--label", help="A name for the run in its reports."),
)  # fmt: skip


def load_options(command: Command) -> Command:
    """Adds them to a command, which gets them as keywords for ``Options``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class LoadCommand(click.Command):
    """Takes ``--goodput ttft:200 tpot:50`` as vLLM's benchmark does: several values behind one option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        after = False
        for place, argument in enumerate(args):
            if after and re.fullmatch(r"(ttft|tpot|e2el?):\S+", argument) and args[place - 1] != "--goodput":
                spread.append("--goodput")
            elif argument.startswith("-"):
                after = argument == "--goodput"
            spread.append(argument)
        return super().parse_args(ctx, spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The shared options as given."""

    url: str
    model: str | None
    api: str
    api_key: str | None
    headers: tuple[str, ...]
    ca_file: Path | None
    extra_body: str | None
    ready_timeout: float
    arrivals: str | None
    burstiness: float | None
    trace: Path | None
    time_scale: float | None
    num_requests: int | None
    duration: float | None
    max_concurrency: int | None
    max_outstanding: int
    prompt_file: Path | None
    task_mix: str | None
    task_mix_to: str | None
    input_len: str | None
    output_len: str
    ignore_eos: bool
    length_scale: float
    max_input_len: int | None
    max_output_len: int | None
    tokens_per_word: float
    temperature: float
    slos: tuple[str, ...]
    send_slo: str | None
    send_task_type: bool
    goodputs: tuple[str, ...]
    seed: int
    warmup_requests: int
    request_timeout: float
    drain_timeout: float
    shown: bool | None
    label: str | None

    def session(self) -> Session:
        """Raises InvalidConfig."""
        from greenroom_load.session import Session
        from greenroom_load.transport import transport_for

        style = self._style()
        goodput = Targets.parse(",".join(self.goodputs), field="goodput") if self.goodputs else None
        return Session(
            transport=transport_for(self.url, style),
            style=style,
            model=self.model,
            command=tuple(sys.argv[1:]),
            label=self.label,
            goodput=goodput,
            ready_timeout_s=self.ready_timeout,
            shown=self.shown,
        )

    def plan(
        self, rate: float | None, prompts: Prompts, *, default_requests: int | None, default_duration_s: float | None
    ) -> Plan:
        """``rate`` None: the trace's own. The defaults hold where neither a number nor a duration is given.

        Raises InvalidConfig.
        """
        unbounded = self.num_requests is None and self.duration is None
        arrivals = self._arrivals(rate)
        if unbounded and default_duration_s is None and isinstance(arrivals, Trace):
            default_requests = len(arrivals.recorded)
        targets = TargetsByTask.parse(self.slos)
        if unknown := targets.by_task.keys() - prompts.mix.weights.keys():
            raise UnknownName("slo", min(unknown), prompts.mix.weights)
        if self.input_len is not None and self.prompt_file is not None:
            raise InvalidConfig(
                "input_len", self.input_len, "for templated prompts; those of --prompts are as they are"
            )
        for name, lengths in (("input_len", self.input_len), ("output_len", self.output_len)):
            if lengths == "trace" and not isinstance(arrivals, Trace):
                raise InvalidConfig(name, lengths, "used with --trace")
        return Plan(
            arrivals=arrivals,
            bounds=Bounds(
                num_requests=default_requests if unbounded else self.num_requests,
                duration_s=default_duration_s if unbounded else self.duration,
                max_concurrency=self.max_concurrency,
                max_outstanding=self.max_outstanding,
                request_timeout_s=self.request_timeout,
                drain_timeout_s=self.drain_timeout,
                warmup_requests=self.warmup_requests,
            ),
            prompts=prompts,
            mix=self._mix(prompts),
            output=self._lengths(self.output_len, "output_len", self.max_output_len),
            input=None if self.input_len is None else self._lengths(self.input_len, "input_len", self.max_input_len),
            targets=targets,
            seed=self.seed,
        )

    def prompts(self) -> Prompts:
        """From their beginning. Raises InvalidConfig."""
        if self.prompt_file is not None:
            return FilePrompts(self.prompt_file, self.seed)
        return TemplatedPrompts(self.seed, tokens_per_word=self.tokens_per_word)

    def _arrivals(self, rate: float | None) -> Arrivals:
        kind = self.arrivals
        if kind is None:
            kind = "trace" if self.trace else "gamma" if self.burstiness not in (None, 1.0) else "poisson"
        if (self.trace is not None) != (kind == "trace"):
            raise InvalidConfig("arrivals", kind, "`trace` together with --trace FILE, or another without")
        if self.burstiness is not None and kind not in ("gamma", "poisson"):
            raise InvalidConfig("burstiness", self.burstiness, "for arrivals of the kinds poisson (1) and gamma")
        if self.burstiness not in (None, 1.0) and kind == "poisson":
            raise InvalidConfig("burstiness", self.burstiness, "1 for Poisson arrivals; leave --arrivals out for gamma")
        if self.time_scale is not None and (kind != "trace" or rate is not None):
            raise InvalidConfig("time_scale", self.time_scale, "used with --trace and without a rate")
        if self.trace is not None:
            trace = Trace(read_trace(self.trace), self.time_scale or 1.0, self.trace.name)
            return trace if rate is None else trace.at_rate(rate)
        assert rate is not None
        if math.isinf(rate) and rate > 0:
            if self.arrivals is not None or self.burstiness is not None:
                raise InvalidConfig("request_rate", "inf", "used without --arrivals and --burstiness: nothing arrives")
            return AtOnce()
        match kind:
            case "gamma":
                return Gamma(rate, 1.0 if self.burstiness is None else self.burstiness)
            case "constant":
                return Constant(rate)
            case _:
                return Poisson(rate)

    def _mix(self, prompts: Prompts) -> ShiftingMix:
        known = prompts.mix
        first = known if self.task_mix is None else TaskMix.parse(self.task_mix, field="task_mix")
        last = None if self.task_mix_to is None else TaskMix.parse(self.task_mix_to, field="task_mix_to")
        for name, mix in (("task_mix", first), ("task_mix_to", last)):
            if mix is not None:
                mix.check(known.weights, field=name)
        return ShiftingMix(first, last)

    def _lengths(self, text: str, field: str, most: int | None) -> Lengths:
        return Lengths.parse(text, field=field, scale=self.length_scale, most=most or LONGEST)

    def _style(self) -> Style:
        from greenroom_load.transport import Style

        headers: dict[str, str] = {}
        for text in self.headers:
            match = _HEADER.fullmatch(text)
            if match is None:
                raise InvalidConfig("header", "***", "NAME:VALUE in visible ASCII")
            headers[match[1]] = match[2].strip()
        extra: dict[str, Any] = {}
        if self.extra_body is not None:
            try:
                extra = msgspec.json.decode(self.extra_body, type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise InvalidConfig("extra_body", self.extra_body, f"a JSON object ({error})") from error
        if self.api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", self.api_key):
            raise InvalidConfig("api_key", "***", "visible ASCII characters without spaces")
        return Style(
            api="chat" if self.api == "chat" else "completions",
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            send_slo=None if self.send_slo is None else "headers" if self.send_slo == "headers" else "fields",
            send_task_type=self.send_task_type,
            extra=extra,
            api_key=self.api_key,
            headers=headers,
            ca_file=self.ca_file,
        )
