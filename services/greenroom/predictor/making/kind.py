"""What a kind says of itself, so that it can be made from live traces, kept, served and handed out."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from greenroom.predictor.making.job import Job
from greenroom.predictor.making.pace import Pace
from greenroom.predictor.traces.counts import Floats, Picks, Shape
from greenroom.predictor.traces.samples import Kept, Sample, Tokens
from greenroom.predictor.versions.artifact import Artifact, Codec


class MadeArtifact(Artifact, Protocol):
    """``report``: how it was made and how good it is, JSON."""

    @property
    def report(self) -> Mapping[str, Any]: ...


M = TypeVar("M", bound=MadeArtifact)


class History(NamedTuple, Generic[M]):
    """What there is of a model when it is made anew.

    ``inherited``: what was served when this process began; it stands for sequences that are not in memory. ``served``:
    what is served now. ``unseen``: how many sequences have come since what is served was made.
    """

    inherited: M | None
    served: M | None
    unseen: int


class Kind(ABC, Generic[M]):
    """One kind of artifact. ``codec`` says how it is written, and its name. ``keep`` and ``pace`` run in the service,
    ``make`` in a process of its own."""

    codec: Codec[M]
    needs: ClassVar[tuple[str, ...]] = ()
    """Modules without which it can not be made. They are imported in ``make`` alone (and ``load``)."""
    extra: ClassVar[str] = ""
    """What installs these: ``pip install 'greenroom[EXTRA]'``."""
    keeps_unasked: ClassVar[bool] = False
    """Whether sequences are kept before anyone asks for it."""
    keeps_tokens: ClassVar[bool] = False
    """Whether it is made of the tokens too; what ``keep`` returns is then [rows, ...]. Nothing can be made of a
    sequence whose worker does not tell them."""
    usual_sequences: int = 1
    """It is not made of fewer, unless the memory holds no more."""
    least_sequences: ClassVar[int] = 1
    """It is never made of fewer."""

    @property
    def name(self) -> str:
        return self.codec.kind

    @property
    def keeps(self) -> str:
        """A name for what is kept. Kinds with the same one share the sequences in memory; those that keep tokens have
        others than those that do not."""
        return self.name

    @property
    def lacking(self) -> str | None:
        """A module that it needs and that is not installed."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), None)

    # -- in the service --------------------------------------------------------------------------------------------

    @abstractmethod
    def keep(self, picks: Picks, experts: int) -> Kept | None:
        """What is kept of a sequence of ``picks`` [rows, layers, k], those from ``experts`` on being none. The axes
        behind the first must be the same for all sequences of a model. None: nothing can be made of it. Called in any
        thread."""

    @abstractmethod
    def pace(self, made: bool) -> Pace:
        """When it is made of a model. ``made``: whether a version is kept."""

    def options(self) -> Mapping[str, Any]:
        """What ``make`` is told of the configuration, JSON."""
        return {}

    def earlier(self, history: History[M], sequences: int) -> M | None:
        """Which earlier artifact ``make`` is given beside ``sequences`` sequences."""
        return None

    def judged(self, artifact: M) -> M:
        """``artifact``, withheld where it is not good enough to be served."""
        return artifact

    # -- in a process of its own -----------------------------------------------------------------------------------

    @abstractmethod
    def make(self, job: Job) -> M:
        """The artifact of ``job.model``. Whatever it raises is logged by the service, and tried again."""

    def fits(self, artifact: M, job: Job) -> bool:
        """Whether ``artifact`` is what ``job`` asked for."""
        return artifact.model == job.model


class Predictor(Protocol):
    """Makes forecasts. Called by one thread."""

    def forecast(self, task_type: str, previous: Floats | None) -> Floats:
        """float32[layers, experts], rows of sum 1. ``previous``: the previous prompt's distribution, of that shape."""
        ...


class ForecastKind(Kind[M]):
    """A kind that forecasts are made from."""

    keeps_unasked = True

    @abstractmethod
    def load(self, artifact: M) -> Predictor:
        """``artifact``, ready to forecast from. Called on the thread that forecasts are made on. Whatever it raises
        means that the artifact can not be served."""

    @abstractmethod
    def shape(self, artifact: M) -> Shape:
        """Of the model that it forecasts for."""


class TracedSequence(NamedTuple):
    """What a trace says of a sequence: ``picks`` [rows, layers, k], those from ``experts`` on being none; ``tokens`` of
    the rows, None where they are not told. The first ``prompt_rows`` rows are the prompt's."""

    picks: Picks
    experts: int
    task: str = ""
    tokens: Tokens | None = None
    prompt_rows: int = 0


def kept_of(kinds: Iterable[Kind[Any]], sequence: TracedSequence) -> dict[str, Sample | None]:
    """By ``Kind.keeps``, what is kept of a sequence; None: nothing can be made of it. Called in any thread."""
    found: dict[str, Sample | None] = {}
    for kind in kinds:
        if kind.keeps not in found:
            found[kind.keeps] = _sample_of(kind, sequence)
    return found


def _sample_of(kind: Kind[Any], sequence: TracedSequence) -> Sample | None:
    if kind.keeps_tokens and sequence.tokens is None:
        return None
    kept = kind.keep(sequence.picks, sequence.experts)
    if kept is None or not kind.keeps_tokens or sequence.tokens is None:
        return None if kept is None else Sample(sequence.task, kept)
    return Sample(sequence.task, kept, sequence.tokens.copy(), sequence.prompt_rows)
