"""Training one predictor: deterministic by its seed, on one thread, in seconds to a few minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from greenroom.core.errors import GreenroomError
from greenroom.predictor.judging.gate import POPULARITY_OVERLAP, SERVED_OVERLAP
from greenroom.predictor.judging.scores import Score, score
from greenroom.predictor.kinds.config import LEAST_SEQUENCES
from greenroom.predictor.kinds.emoe.artifact import Architecture, LearnedArtifact, width_for
from greenroom.predictor.kinds.emoe.config import TrainingConfig
from greenroom.predictor.kinds.emoe.networks import (
    ExpertNetwork,
    LearnedPredictor,
    by_slot,
    shifted,
    weights_of,
)
from greenroom.predictor.kinds.emoe.priors import Priors, priors_of, tasks_of, without_each
from greenroom.predictor.kinds.emoe.sequences import Sequences
from greenroom.predictor.traces.counts import Floats

_FORGET_TASK = 0.1
_FORGET_PREVIOUS = 0.1
_WEIGHT_DECAY = 0.05
_MOST_GRADIENT = 1.0


class TooFewSequences(GreenroomError):
    """Too few to learn from them and to measure how well it was learnt."""


@dataclass(frozen=True, slots=True)
class Split:
    """By arrival: those before ``fit`` are learnt from, those before ``train`` say when to stop, the rest are measured
    on."""

    fit: int
    train: int


def split(sequences: Sequences, config: TrainingConfig) -> Split:
    """Raises TooFewSequences."""
    count = len(sequences)
    if count < LEAST_SEQUENCES:
        raise TooFewSequences(f"{count} sequences are too few to learn from; record at least {LEAST_SEQUENCES}")
    train = count - max(1, round(count * config.test_share))
    return Split(train - max(1, round(train * config.tail_share)), train)


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Prompts to be predicted. ``before``: [n, layers, experts], the previous one of the same type; what is usual of
    the type where there was none. ``targets``: [n, layers, k, experts]."""

    before: Tensor
    targets: Tensor
    prior: Tensor
    task: Tensor
    """Numbers of task types."""

    def __len__(self) -> int:
        return len(self.task)

    def some(self, places: npt.NDArray[np.int64]) -> Prompts:
        return Prompts(self.before[places], self.targets[places], self.prior[places], self.task[places])


def prompts_of(
    sequences: Sequences, priors: Priors, places: npt.NDArray[np.int64], prior: Floats | None = None
) -> Prompts:
    """Those at ``places``; ``prior``: of each of them, else that of its type."""
    numbers = np.asarray([priors.number(sequences.tasks[place]) for place in places])
    before = before_of(sequences, priors, places)
    given = priors.by_slot[numbers] if prior is None else prior
    return Prompts(
        torch.from_numpy(before),
        torch.from_numpy(sequences.by_slot()[places]),
        torch.from_numpy(given),
        torch.from_numpy(numbers),
    )


def before_of(sequences: Sequences, priors: Priors, places: npt.NDArray[np.int64]) -> Floats:
    """[n, layers, experts]: the previous prompt of the same type; what is usual of the type where that says nothing."""
    previous = sequences.previous()[places]
    popularity = priors.by_layer[[priors.number(sequences.tasks[place]) for place in places]]
    own = sequences.by_layer()[previous]
    known = (previous >= 0)[:, None, None] & (own.sum(axis=-1, keepdims=True) > 0)
    before: Floats = np.where(known, own, popularity)
    return before


def train(
    sequences: Sequences,
    config: TrainingConfig,
    *,
    model: str = "",
    served: LearnedArtifact | None = None,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
) -> LearnedArtifact:
    """Learn from the first ``1 - test_share`` of ``sequences``. The artifact's report is on the others: what
    ``measure`` says, the overlap of popularity by task type, and that of what is ``served`` if it has the same shape.

    ``on_epoch``: is told each epoch's loss on the tail. Raises TooFewSequences.
    """
    with _on_one_thread():
        artifact = _train(sequences, config, model, on_epoch)
        test = np.arange(split(sequences, config).train, len(sequences))
        report = {**artifact.report, POPULARITY_OVERLAP: _usual(artifact.priors, sequences, test)}
        if served is not None and served.shape == artifact.shape and served.architecture.slots == sequences.slots:
            report[SERVED_OVERLAP] = measure(served, sequences, test).overlap
        return replace(artifact, report=report)


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Several threads gain nothing on layers this small, lose much on busy cores, and sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(
    sequences: Sequences, config: TrainingConfig, model: str, on_epoch: Callable[[int, float], None]
) -> LearnedArtifact:
    began = time.perf_counter()
    torch.manual_seed(config.seed)
    parts = split(sequences, config)
    fitted, trained = _first(sequences, parts.fit), _first(sequences, parts.train)
    tasks = tasks_of(trained)
    priors = priors_of(fitted, tasks)
    architecture = Architecture(
        kind=config.kind,
        backbone=config.backbone,
        layers=sequences.layers,
        slots=sequences.slots,
        experts=sequences.experts,
        tasks=len(tasks),
        width=config.width or width_for(sequences.experts),
        depth=config.depth,
    )
    network = ExpertNetwork(architecture)
    numbers = np.asarray([priors.number(task) for task in fitted.tasks])
    fit = prompts_of(fitted, priors, np.arange(parts.fit), without_each(fitted, priors, numbers))
    tail = prompts_of(trained, priors, np.arange(parts.fit, parts.train))
    epochs = _Training(network, config, priors).run(fit, tail, on_epoch)
    artifact = LearnedArtifact(
        model=model,
        version=0,
        created_ms=0,
        architecture=architecture,
        priors=priors_of(trained, tasks),
        weights=weights_of(network),
        sequences=parts.train,
        seed=config.seed,
    )
    test = np.arange(parts.train, len(sequences))
    report: dict[str, Any] = {
        "test_sequences": len(test),
        "epochs": epochs,
        "seconds": round(time.perf_counter() - began, 2),
        "bytes": artifact.nbytes,
        **measure(artifact, sequences, test).as_json(),
    }
    return replace(artifact, report=report)


def measure(artifact: LearnedArtifact, sequences: Sequences, places: npt.NDArray[np.int64]) -> Score:
    """On the prompts at ``places``, each after its own previous one."""
    predictor = LearnedPredictor(artifact)
    before = before_of(sequences, artifact.priors, places)
    predicted = predictor.forecasts([sequences.tasks[place] for place in places], before)
    return score(predicted, sequences.counts[places])


def _usual(priors: Priors, sequences: Sequences, places: npt.NDArray[np.int64]) -> float:
    """The overlap of popularity by task type with the prompts at ``places``."""
    numbers = [priors.number(sequences.tasks[place]) for place in places]
    return score(priors.by_slot[numbers], sequences.counts[places]).overlap


class _Training:
    def __init__(self, network: ExpertNetwork, config: TrainingConfig, priors: Priors) -> None:
        self._network = network
        self._config = config
        self._popularity = torch.from_numpy(priors.by_layer)
        self._slots = torch.from_numpy(priors.slots)
        self._random = np.random.default_rng(config.seed)

    def run(self, fit: Prompts, tail: Prompts, on_epoch: Callable[[int, float], None]) -> int:
        """Ends with the weights of the best epoch, or of the start. Returns the number of epochs."""
        config, network = self._config, self._network
        optimiser = torch.optim.AdamW(network.parameters(), config.learning_rate, weight_decay=_WEIGHT_DECAY)
        best, kept, since, epoch = self._loss_on(tail), _copy(network), 0, 0
        for epoch in range(1, config.epochs + 1):
            network.train()
            order = self._random.permutation(len(fit))
            for start in range(0, len(order), config.batch):
                optimiser.zero_grad()
                loss_of_batch = self._loss(self._forgetful(fit.some(order[start : start + config.batch])))
                loss_of_batch.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(network.parameters(), _MOST_GRADIENT)
                optimiser.step()
            loss = self._loss_on(tail)
            on_epoch(epoch, loss)
            since += 1
            if loss < best:
                best, kept, since = loss, _copy(network), 0
            elif since >= config.patience:
                break
        network.load_state_dict(kept)
        network.eval()
        return epoch

    def _forgetful(self, batch: Prompts) -> Prompts:
        """Hide the previous prompt or the type of some, so that the network can do without."""
        task, before = batch.task.clone(), batch.before.clone()
        no_previous = torch.from_numpy(self._random.random(len(batch)) < _FORGET_PREVIOUS)
        before[no_previous] = self._popularity[task[no_previous]]
        task[torch.from_numpy(self._random.random(len(batch)) < _FORGET_TASK)] = 0
        return Prompts(before, batch.targets, batch.prior, task)

    def _loss(self, batch: Prompts) -> Tensor:
        usual = self._popularity[0].expand_as(batch.before)
        if not self._network.causal:
            return _cross_entropy(self._logits(batch, batch.before, usual), batch.targets)
        # Once with the prompt's own layers and once with what it predicts of them, as it will be used.
        own = torch.einsum("nlke,lk->nle", batch.targets, self._slots)
        own = torch.where(own.sum(dim=-1, keepdim=True) > 0, own, usual)
        taught = self._logits(batch, shifted(batch.before, own), usual)
        predicted = torch.einsum("nlke,lk->nle", taught.detach().softmax(dim=-1), self._slots)
        alone = self._logits(batch, shifted(batch.before, predicted), usual)
        return (_cross_entropy(taught, batch.targets) + _cross_entropy(alone, batch.targets)) / 2

    def _logits(self, batch: Prompts, given: Tensor, usual: Tensor) -> Tensor:
        logits: Tensor = self._network(given, usual, batch.prior, self._slots, batch.task)
        return logits

    def _loss_on(self, prompts: Prompts) -> float:
        self._network.eval()
        with torch.inference_mode():
            predicted = by_slot(
                self._network, prompts.before, self._popularity[0], prompts.prior, self._slots, prompts.task
            )
        return float(_cross_entropy(predicted.clamp_min(1e-9).log(), prompts.targets))


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over those slots of those layers that have a pick."""
    losses = -(targets * logits.log_softmax(dim=-1)).sum(dim=-1)
    present = targets.sum(dim=-1) > 0
    return losses[present].mean()


def _first(sequences: Sequences, count: int) -> Sequences:
    return Sequences(sequences.tasks[:count], sequences.counts[:count])


def _copy(network: ExpertNetwork) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in network.state_dict().items()}
