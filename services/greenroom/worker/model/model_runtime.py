"""One model, assembled: checkpoint, pack, memory plan, expert engine and batch loop."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.errors import TransferFailed, UnsupportedModel
from greenroom.core.generation import ServedModel
from greenroom.core.machine import machine_name
from greenroom.core.model_profile import ModelProfile, load_model_profile
from greenroom.core.units import format_bytes
from greenroom.experts.copying.cuda import accelerator_of
from greenroom.experts.copying.disk_calibration import load_or_measure
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.layout import PLAIN
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.architecture.families import ENCODER_DECODER_REASON, family_of
from greenroom.moe.architecture.moe_layers import model_class
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.batch_loop import BatchLoop
from greenroom.moe.batch.step_picks import Picks, StepPicks
from greenroom.moe.formats.expert_format import PLAIN_FORMAT
from greenroom.moe.forward import batch_invariance
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.forward.ragged_probe import refuse_stateful
from greenroom.moe.forward.row_limits import limits_for
from greenroom.moe.kernels.expert_products import describe_products
from greenroom.moe.loading.checkpoint import Checkpoint, resolve
from greenroom.moe.loading.kept_format import describe_kept, keeps_dense
from greenroom.moe.loading.kept_pack import kept_pack
from greenroom.moe.loading.load_model import LoadedMoE, attach, load, use_residual
from greenroom.moe.loading.packing import resolve_dtype
from greenroom.moe.native.rows import ANY_ROWS
from greenroom.moe.routing.expert_mlp import predictors_for
from greenroom.policies.base.answer_lengths import AnswerLengths
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.fidelity import Fidelity, check_profile
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.policies.expertflow.paths_of_file import paths_of_file
from greenroom.policies.registry import create_policy, policy_class, spelling
from greenroom.text import StopChecker, TextProcessor
from greenroom.worker.generation_engine import ArtifactVersion
from greenroom.worker.model.config import WorkerConfig, takes
from greenroom.worker.model.expert_moves import EngineMoves
from greenroom.worker.model.files_of_other_models import without_others
from greenroom.worker.model.generator import LoopGenerator
from greenroom.worker.model.memory_needs import needs_of
from greenroom.worker.model.memory_plan import MemoryPlan, Needs, plan_memory, plan_rows, plan_to_fit
from greenroom.worker.model.warm_start import ResidentSetFile, first_residents
from greenroom.worker.usable_memory import gpu_memory, memory, resident_bytes, usable_cores

log = logging.getLogger(__name__)

_STALLED_FILL_S = 60.0
"""After which a start that waits for experts gives up, if none has come."""


class ModelRuntime:
    """A model that is ready to generate; a context manager that closes it.

    Construction does everything that takes long, with progress bars: packing at first use, loading. The expert slots
    are filled behind the first requests (``wait_filled``), except where rows are confined to resident experts: then
    construction waits for it. Raises a GreenroomError that says what is wrong; then nothing is left running.

    ``policy`` makes the expert policy, in place of the configured one; its ``row_mask`` counts.
    """

    def __init__(self, config: WorkerConfig, *, policy: Callable[[Catalogue], ExpertPolicy] | None = None) -> None:
        torch.set_num_threads(config.threads or usable_cores())
        self.accelerator = accelerator_of(config.device)
        self._device = torch.device("cpu") if self.accelerator is None else self.accelerator.device
        self.config = config
        self._make_policy = policy
        self.checkpoint: Checkpoint = resolve(config.model, revision=config.revision, offline=config.offline)
        if not family_of(self.checkpoint.config).decoder_only:
            raise UnsupportedModel(ENCODER_DECODER_REASON)
        refuse_stateful(self.checkpoint.config, model_class(self.checkpoint.config))
        self._refuse_masking(family_of(self.checkpoint.config).masking(self.checkpoint.config))
        self.text = TextProcessor.from_folder(self.checkpoint.folder)
        # Refuses what it can not keep before anything is packed.
        dtype = resolve_dtype(self.checkpoint, config.dtype)
        keeps_dense(dtype, config.dense_as, products=config.products, device=self._device.type)
        kept = kept_pack(
            *(self.checkpoint, config.dtype, config.experts_as, config.cache_dir),
            products=config.products, device=self._device.type, progress=config.progress,
        )  # fmt: skip
        self._expert_format = kept.format
        self._experts_as = "" if kept.stands_in else config.experts_as
        self.pack = PackFile.open(kept.path)
        try:
            self.config = config = without_others(
                config,
                catalogue_of(self.pack.manifest),
                hidden=self.checkpoint.config.get_text_config().hidden_size,
                model=self.checkpoint.name,
            )
            self.profile: ModelProfile | None = (
                None if config.profile is None else load_model_profile(Path(config.profile))
            )
            """The profile of the model that `greenroom profile` made, where there is one."""
            if self.profile is not None:
                check_profile(self.profile, catalogue_of(self.pack.manifest), self.checkpoint.name)
                for said in (
                    self.profile.said_of_machine(machine_name()),
                    self.profile.said_of_format(", ".join(self.pack.manifest.formats)),
                ):
                    if said is not None:
                        log.warning("%s", said)
            self._assemble()
        except BaseException:
            self.pack.close()
            raise

    def _assemble(self) -> None:
        config = self.config
        with _transformers_bars(self._shows_progress):
            loaded = load(
                *(self.checkpoint, config.dtype),
                device=self._device, products=config.products, dense_as=config.dense_as,
                expert_format=[
                    PLAIN_FORMAT if layer.format == PLAIN else self._expert_format.of(layer.name)
                    for layer in self.pack.manifest.layers
                ],
            )  # fmt: skip
        self._refuse_masking(loaded.masking)
        ragged = RaggedModel(
            loaded.model, attention=None if config.attention == "auto" else config.attention, native=loaded.native
        )
        asked = str(ANY_ROWS) if config.batch_invariant else config.compiled_rows
        limits = limits_for(loaded, ragged, self.pack, asked)
        if loaded.native is not None and limits is not None:
            loaded.native.limits = limits
        if config.batch_invariant:
            batch_invariance.require(loaded, ragged)
        self._products = describe_products(loaded.native, loaded.dtype)
        self.dense_formats = loaded.dense_formats
        """Of linear layers outside the experts that stay as they are stored."""
        dependence = batch_invariance.why_not(loaded, ragged)
        if config.fidelity != "exact":
            dependence = f"fidelity {config.fidelity!r} has rows go to the experts that are resident"
        self._company = "do not change with it" if dependence is None else f"may change with it: {dependence}"
        max_model_len = min(loaded.max_model_len, config.max_model_len or loaded.max_model_len, ragged.max_positions)

        def needs_at(config: WorkerConfig, length: int) -> Needs:
            return needs_of(
                *(loaded.model, loaded.layers, self.pack.manifest, ragged, config, length, self.profile),
                expanding=loaded.expanding_bytes,
            )

        needs = needs_at(config, max_model_len)
        in_ram = needs.dense if self.accelerator is None else 0
        runtime = max(0, resident_bytes() - in_ram)  # after a first forward: with all the code it needs
        there = memory() if self.accelerator is None else gpu_memory(self._device)
        ram = None if self.accelerator is None else memory()

        def plan_at(rows: int) -> tuple[MemoryPlan, int]:
            with_rows = replace(config, tokens_per_step=rows)
            return plan_to_fit(
                lambda length: needs_at(with_rows, length),
                max_model_len,
                lambda needs: plan_memory(
                    needs,
                    there,
                    runtime,
                    expert_memory=config.expert_memory,
                    host_memory=config.host_memory,
                    kv_memory=config.kv_memory,
                    loaded=needs.dense,
                    ram=ram,
                ),
                fixed=config.max_model_len is not None,
            )

        self.plan: MemoryPlan
        rows = config.step_rows
        if config.wants_whole_prompts:
            self.plan, length, rows = plan_rows(
                plan_at, rows, max_model_len, holds=lambda plan: ragged.layout.rows_within(plan.kv) + 1
            )  # fmt: skip
        else:
            self.plan, length = plan_at(rows)
        self.config = config = replace(config, tokens_per_step=rows)
        limit = config.max_model_len and max_model_len  # None: what KV can hold
        if length < max_model_len:
            limit = min(length, ragged.layout.rows_within(self.plan.kv) + 1)
        self.experts = self._start_experts()
        try:
            attach(loaded, self.experts)
            if config.residual is not None:
                use_residual(loaded, config.residual)
            self.hooks = loaded.hooks
            ragged.source = self.experts
            self.loop = self._start_loop(loaded, ragged, limit)
        except BaseException:
            self.experts.close()
            raise
        self.served = ServedModel(
            name=config.served_model_name or self.checkpoint.name,
            max_model_len=self.loop.engine.max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            created=int(time.time()),
        )

    def _start_experts(self) -> ExpertEngine:
        catalogue = catalogue_of(self.pack.manifest)
        own = self._make_policy
        if own is None:
            policy = create_policy(self.config.policy, catalogue=catalogue, options=self._policy_options())
        else:
            policy = own(catalogue)
        self.artifacts: dict[str, ArtifactVersion | None] = dict.fromkeys(
            sorted(policy.artifacts | self.config.artifact_kinds)
        )
        if self.config.policy == "belady" and "future" not in self.config.policy_options:
            log.warning("belady has not been told the future: it is lru here (greenroom replay knows it)")
        slots = EngineConfig(
            device_slots=self.plan.device_slots,
            host_slots=self.plan.host_slots,
            fidelity=Fidelity(self.config.fidelity, self.profile, waits=self.config.await_target),
            approximate=own is not None,
        )
        self.link = load_or_measure(self.pack, on_measure=self._say)
        hardware = RealHardware(None if self.link is None else self.link.reads, self.accelerator)
        predictors = predictors_for(policy, self.accelerator)
        engine = ExpertEngine(self.pack, catalogue, policy, slots, hardware=hardware, predictors=predictors)
        try:
            for kind, path in self.config.artifact_files.items():
                file = ARTIFACT_FILES[kind].read(path)
                artifact = artifact_of(catalogue, file, str(path))
                if kind in policy.artifacts:
                    engine.swapped(engine.prepare(artifact))
                self.artifacts[kind] = ArtifactVersion.of(file)
            remembered = ResidentSetFile(self.pack.path).load(catalogue) if self.config.warm_start else []
            order = policy.fill_order()
            wanted = first_residents(catalogue, remembered, policy.target, order)
            engine.fill(wanted)
            drops = policy.target is not None and policy.target.drop_others
            if drops and engine.device.slots == catalogue.size:
                self._wait_for_fill(engine)  # once all are there it is never asked again, and drops none of them
            elif own is not None or self.config.fidelity != "exact":
                self._wait_for_fill(engine)  # answers depend on what is resident
                if failed := engine.fill_progress.failed:
                    raise TransferFailed(f"{failed} experts could not be read, and others would answer in their place")
            engine.fill_host(wanted if order is None else order.tolist())
        except BaseException:
            engine.close()
            raise
        return engine

    def _wait_for_fill(self, engine: ExpertEngine) -> None:
        """Raises TransferFailed where it stands still."""
        with tqdm(
            total=engine.fill_progress.left, desc="loading experts", unit="expert", disable=not self._shows_progress
        ) as bar:
            if not engine.wait_filled(_STALLED_FILL_S, bar.update):
                raise TransferFailed(f"no expert was loaded within {_STALLED_FILL_S:g} s")

    def prepare(self, file: ArtifactFile) -> Artifact:
        """The artifact of the file, made ready for ``swap``. In any thread. Raises InvalidConfig for one of another
        model."""
        artifact = artifact_of(self.experts.catalogue, file, f"version {file.version}")
        if isinstance(file, PathsFile):
            return replace(artifact, prepared=self._token_paths(file, self.served.vocab_size))
        return self.experts.prepare(artifact)

    def swap(self, artifact: Artifact, version: ArtifactVersion) -> None:
        """Have the policies predict by the artifact from now on. On the thread that owns the experts, between steps."""
        if isinstance(artifact.prepared, TokenPaths) and self._fetches:
            self.loop.engine.swap_paths(artifact.prepared)
        if artifact.kind in self.experts.policy.artifacts:
            self.experts.swapped(artifact)
        self.artifacts[artifact.kind] = version

    def _token_paths(self, file: PathsFile, vocabulary: int) -> TokenPaths:
        """What foretells routing paths by the file. Raises InvalidConfig for one of another model or vocabulary."""
        policy = self.experts.policy
        return paths_of_file(file, self.experts.catalogue, past=policy.past_logits, vocabulary=vocabulary)

    def _policy_options(self) -> dict[str, Any]:
        """The options given for the policy, and the profile and the fidelity where the policy has such an option."""
        own = {"profile": self.profile, "fidelity": self.config.fidelity}
        policy = policy_class(self.config.policy, self.config.policy_options)
        taken = {name: value for name, value in own.items() if takes(policy, name)}
        return {**taken, **self.config.policy_options}

    def _refuse_masking(self, why: str | None) -> None:
        """Raises UnsupportedModel where the fidelity confines rows to some experts, and ``why`` says that the model's
        routers can not be confined."""
        if why is not None and self.config.fidelity != "exact":
            raise UnsupportedModel(
                f"fidelity {self.config.fidelity!r} is not for models of type {self.checkpoint.config.model_type!r}: "
                f"their routers can not be confined to some experts: {why}; use fidelity 'exact'"
            )

    def _start_loop(self, loaded: LoadedMoE, ragged: RaggedModel, max_model_len: int | None) -> BatchLoop:
        config = self.config
        policy = config.make_batch_policy()
        batch = BatchConfig(
            kv_budget_bytes=self.plan.kv,
            max_model_len=max_model_len,
            tokens_per_step=config.step_rows,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            prefill_chunk=config.prefill_chunk,
            rows_per_forward=config.rows_per_forward,
            plans_rounds=policy.plans_rounds,
        )
        paths = None
        if config.paths is not None:
            made = self._token_paths(PathsFile.read(config.paths), loaded.vocab_size)  # refused where it is wrong
            paths = made if self._fetches else None
        elif policy.reads_paths:
            log.warning("batching %s: %s", config.batching, policy.without_paths)
        engine = BatchEngine(
            ragged,
            batch,
            policy,
            eos_token_ids=loaded.eos_token_ids,
            stop_checkers=lambda params: StopChecker(self.text.tokenizer, params.stop, params.min_tokens),
            observer=self.experts,
            moves=EngineMoves(self.experts, self.link),
            paths=paths,
            picks=self._picks_for_paths(policy),
            lengths=AnswerLengths(self.profile),
        )
        return BatchLoop(engine).start()

    @property
    def _fetches(self) -> bool:
        """Whether experts are ever fetched: where all fit, nothing is gained by foretelling which are used."""
        return self.experts.device.slots < self.experts.catalogue.size

    def _picks_for_paths(self, policy: BatchPolicy) -> Callable[[], Picks | None] | None:
        """What each step picked, where paths may be foretold. None: nobody uses them."""
        experts = self.experts
        if not self._fetches or (not policy.reads_paths and PathsFile.KIND not in experts.policy.artifacts):
            return None
        picks = StepPicks(experts.catalogue)
        experts.also_tell(picks)
        return picks.take

    @property
    def _shows_progress(self) -> bool:
        return sys.stderr.isatty() if self.config.progress is None else self.config.progress

    def _say(self, line: str) -> None:
        if self._shows_progress:
            tqdm.write(line, file=sys.stderr)

    def wait_filled(self, timeout_s: float) -> bool:
        """Wait until the first fill of the expert slots is over. Requests need not wait. False: it takes longer."""
        return self.experts.filled.wait(timeout_s)

    def generator(self) -> LoopGenerator:
        """This model as an asyncio Generator; to be used from one event loop."""
        return LoopGenerator(self.loop, self.served)

    def describe(self) -> str:
        """The model and how it is served, for people."""
        reads = "past the page cache" if self.pack.direct else "through the page cache, dropped after each read"
        link = "whole records (the pack is small: not measured)" if self.link is None else self.link.describe()
        kind = f"{self.checkpoint.config.model_type}, {self.pack.manifest.dtype} on {self._device}"
        kept = describe_kept(self.pack.manifest.formats, self._experts_as)
        dense = f"; dense layers as {' and '.join(self.dense_formats)}" if self.dense_formats else ""
        policy = spelling(self.config.policy, self.config.policy_options)
        maps = "" if self.config.residual is None else f" with the maps of {self.config.residual}"
        return (
            f"model {self.served.name}: {kind}, "
            f"{len(self.pack.manifest.layers)} MoE layers, {self.served.max_model_len} tokens a request\n"
            f"experts: policy {policy}{maps}, fidelity {self.config.fidelity}, "
            f"read {reads} from {self.pack.path} ({format_bytes(self.pack.manifest.record_bytes)}{kept})\n"
            f"reads: {link}\n"
            f"products: {self._products}{dense}\n"
            f"company: texts {self._company}\n"
            f"batching: {self.config.batching}, at most {self.config.step_rows} rows a step\n"
            f"memory:\n{self.plan.describe()}"
        )

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let running ones go on for ``drain_s``, stop, and remember the resident experts."""
        try:
            self.loop.stop(drain_s)
        finally:
            if self.config.warm_start:
                ResidentSetFile(self.pack.path).save(self.experts.catalogue, self.experts.keys_to_remember())
            self.experts.close()
            self.pack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _transformers_bars(shown: bool) -> Iterator[None]:
    """transformers shows its own bars wherever stderr goes; these follow our setting."""
    before = transformers_logging.is_progress_bar_enabled()
    (transformers_logging.enable_progress_bar if shown else transformers_logging.disable_progress_bar)()
    try:
        yield
    finally:
        (transformers_logging.enable_progress_bar if before else transformers_logging.disable_progress_bar)()
