"""The engine as a Python object::

from greenroom import LLM, SamplingParams

with LLM("mistralai/Mixtral-8x7B-Instruct-v0.1", expert_memory="16GiB") as llm:
    for completion in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
        print(completion.text)
"""

from __future__ import annotations

import itertools
import sys
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from greenroom.core.errors import GreenroomError, InvalidConfig, InvalidRequest
from greenroom.core.generation import Finished, FinishReason, GenerationRequest, SamplingParams, TokenLogprobs
from greenroom.demo import bundled_model_path
from greenroom.moe.batch import completions
from greenroom.text import TextStream
from greenroom.text.hub import local_folder
from greenroom.worker.model.config import WorkerConfig, chosen_policy
from greenroom.worker.model.files_beside import files_beside
from greenroom.worker.model.model_runtime import ModelRuntime

Prompt = str | Sequence[int]
ChatMessage = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what was generated for it. ``logprobs`` has one entry a token where they were asked for,
    ``prompt_logprobs`` one for each token of the prompt but the first.

    ``approximated``: of all times that a layer's router chose experts for one of its tokens, the share where it was
    kept from those it would have chosen; 0 unless ``fidelity`` is other than exact.
    """

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    approximated: float = 0.0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class GenerationFailed(GreenroomError):
    """A request failed on its way; the others went on."""


class LLM:
    """A model, ready to generate. Settings are those of ``greenroom serve``, see WorkerConfig. As there, files in the
    model's folder that the policy predicts by are taken up where the settings name none.

    Not to be used from several threads at once. Close it, or use it as a context manager: that stops its threads and
    remembers which experts were resident. Else it is closed with the last reference to it, or as the interpreter ends.
    """

    def __init__(self, model: str | None = None, *, config: WorkerConfig | None = None, **settings: Any) -> None:
        """``model``: a folder, a GGUF file or a hub id; None is the bundled model. ``config`` says everything at once
        instead.

        Raises GreenroomError.
        """
        if config is None:
            config = _config_of(model or str(bundled_model_path()), settings)
        elif model is not None or settings:
            raise InvalidConfig("config", "...", "give either a config, or a model and settings")
        self.worker = ModelRuntime(config)
        # At the interpreter's exit too: a thread that computes while it ends would abort the process.
        self._close = weakref.finalize(self, _close, self.worker)
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        task_types: Sequence[str | None] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Complete each prompt (text, or token ids); results in the order of the prompts.

        ``sampling``: one for all, or one for each. ``progress`` None shows a bar on a terminal only. Raises
        InvalidRequest before anything runs if one of them can not be served, GenerationFailed if one fails.
        """
        wanted = _as_prompts(prompts)
        params = _for_each(sampling if sampling is not None else SamplingParams(), len(wanted))
        tasks = list(task_types) if task_types is not None else [None] * len(wanted)
        if len(tasks) != len(wanted):
            raise InvalidRequest(f"{len(wanted)} prompts, but {len(tasks)} task types", param="task_types")
        requests = [
            GenerationRequest(f"{self._name}-{next(self._numbers)}", self._ids(prompt), one, task)
            for prompt, one, task in zip(wanted, params, tasks, strict=True)
        ]
        for request in requests:
            self.worker.loop.engine.admit_check(request)
        return [self._completion(*parts) for parts in zip(wanted, requests, self._run(requests, progress), strict=True)]

    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or each of several, by the model's chat template.

        A message is ``{"role": ..., "content": ...}``. Raises as ``generate``, and InvalidRequest without a template.
        """
        several = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        chat = self.worker.text.chat
        texts = [chat.render([dict(message) for message in messages]) for messages in several]  # type: ignore[arg-type]
        return self.generate([self._encode(text, special=False) for text in texts], sampling, progress=progress)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._encode(prompt, special=True))
        return tuple(prompt)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        tokenizer, most = self.worker.text.tokenizer, self.worker.served.max_model_len
        fewest = tokenizer.fewest_tokens(text)
        if fewest > most:  # encoding it would take seconds, for nothing
            raise InvalidRequest(
                f"a request may have {most} tokens in all; this prompt has {fewest} or more",
                param="prompt",
                code="context_length_exceeded",
            )
        return tokenizer.encode(text, add_special_tokens=special)

    def _run(self, requests: Sequence[GenerationRequest], progress: bool | None) -> list[completions.Completion]:
        disable = not sys.stderr.isatty() if progress is None else not progress
        with tqdm(total=len(requests), desc="generating", unit="request", disable=disable) as bar:

            def finished(place: int, end: Finished) -> None:
                bar.update()

            return completions.complete(self.worker.loop, requests, on_finished=finished)

    def _completion(self, prompt: Prompt, request: GenerationRequest, made: completions.Completion) -> Completion:
        if made.finished.reason in (FinishReason.FAILED, FinishReason.CANCELLED):
            raise GenerationFailed(made.finished.error or "the request was cancelled")
        sampling = request.sampling
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.worker.served.eos_token_ids)}
        stream = TextStream(
            self.worker.text.tokenizer,
            sampling.stop,
            behind_text=isinstance(prompt, str),
            min_tokens=sampling.min_tokens,
        )
        text = "".join(stream.push(token) for token in made.token_ids if token not in ends) + stream.finish()
        return Completion(
            prompt=prompt,
            prompt_token_ids=request.prompt_ids,
            text=text,
            token_ids=made.token_ids,
            finish_reason=made.finished.reason,
            logprobs=None if sampling.logprobs is None else made.logprobs,
            prompt_logprobs=made.finished.prompt_logprobs,
            approximated=made.finished.approximated,
        )


def _close(worker: ModelRuntime) -> None:
    """The last reference may go on any thread. The model's own can not wait for its end."""
    if worker.loop.is_current:
        threading.Thread(target=worker.close, name="llm-close").start()
    else:
        worker.close()


_PATHS = {field.name for field in fields(WorkerConfig) if field.type == "Path | None"}


def _config_of(model: str, settings: dict[str, Any]) -> WorkerConfig:
    settings = {
        name: Path(value) if name in _PATHS and isinstance(value, str) else value for name, value in settings.items()
    }
    folder = local_folder(model, settings.get("revision"))
    if folder is not None:
        usual = {field.name: field.default for field in fields(WorkerConfig)}
        policy, options = chosen_policy(settings.get("policy", usual["policy"]), settings.get("policy_options", {}))
        given = {name for name, value in settings.items() if value is not None}
        batching = settings.get("batching", usual["batching"])
        beside = files_beside(folder, policy, options, given, batching=batching)
        settings = {**settings, **beside, "found_beside": frozenset(beside)}
    return WorkerConfig(model=model, **settings)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # one prompt, as token ids
    return list(prompts)  # type: ignore[arg-type]


def _for_each(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise InvalidRequest(f"{count} prompts, but {len(sampling)} sampling parameters", param="sampling")
    return list(sampling)
