"""transformers and accelerate as arms. They run within child processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness.children.process_memory import peak_bytes, reset_peak
from benchmarks.harness.turn import Turn, timed
from greenroom.moe.native.tiles import avoid_tiles_without_shape

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
"""transformers' own experts' implementations, each with sdpa attention."""


class _GenerateArm:
    """A transformers model whose ``generate`` runs the stream, greedily, without an end-of-sequence token."""

    model: Any
    device: torch.device = torch.device("cpu")
    """Of the model's first layer, and so of what it is given."""

    def _start(self) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        avoid_tiles_without_shape()
        transformers.utils.logging.disable_progress_bar()

    def describe(self) -> dict[str, Any]:
        return {"implementation": self.model.config._experts_implementation}

    def run(
        self,
        prompts: list[list[int]],
        lengths: list[int],
        concurrency: int = 1,
        implementation: str | None = None,
        threads: int | None = None,
    ) -> dict[str, Any]:
        """``concurrency`` prompts a call, padded on the left. A call lasts as long as its longest answer.

        ``threads``: None for all cores.
        """
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        if implementation is not None:
            self.model.set_experts_implementation(implementation)
        reset_peak()
        ids: list[list[int]] = []
        with timed() as seconds:
            for first in range(0, len(prompts), concurrency):
                chosen = slice(first, first + concurrency)
                ids += self._generate(prompts[chosen], lengths[chosen])
        return Turn(seconds[0], sum(map(len, ids)), ids, peak_bytes()).as_json()

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = self.model.generate(
            padded.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=max(lengths),
            do_sample=False,
            pad_token_id=0,
        )[:, longest:].tolist()
        return [row[:length] for row, length in zip(made, lengths, strict=True)]

    def close(self) -> None:
        self.model = None


class TransformersArm(_GenerateArm):
    """All weights in memory."""

    def __init__(self, model: str, device: str = "cpu") -> None:
        self._start()
        self.device = torch.device(device)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model = _greedy(loaded.to(self.device))


class DiskOffloadArm(_GenerateArm):
    """accelerate's ``disk_offload``: each forward reads every module's weights from memory-mapped files.

    The weights are in ``offload_folder`` already; the model here is built without any.
    """

    def __init__(self, model: str, offload_folder: str) -> None:
        from accelerate import disk_offload, init_empty_weights

        self._start()
        config = AutoConfig.from_pretrained(model)
        with init_empty_weights():
            empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        empty.tie_weights()
        self.model = _greedy(disk_offload(empty.eval(), offload_folder, execution_device=torch.device("cpu")))
        self.model.set_experts_implementation("grouped_mm")


class DeviceMapArm(_GenerateArm):
    """accelerate by transformers' ``device_map``: whole layers in ``memory_bytes`` of RAM, the others on disk. On
    ``cuda``: in so much of the GPU's memory, the others in RAM.
    """

    def __init__(self, model: str, memory_bytes: int, scratch: str, device: str = "cpu") -> None:
        self._start()
        self.device = torch.device(device)
        limits: dict[Any, Any] = {"cpu": memory_bytes}
        if device != "cpu":
            limits = {0: memory_bytes, "cpu": psutil.virtual_memory().available}
        self._folder = Path(tempfile.mkdtemp(prefix="device-map-", dir=scratch))
        try:
            self.model = _greedy(
                AutoModelForCausalLM.from_pretrained(
                    model,
                    dtype=torch.bfloat16,
                    attn_implementation="sdpa",
                    device_map="auto",
                    max_memory=limits,
                    offload_folder=str(self._folder),
                )
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def describe(self) -> dict[str, Any]:
        places = list(getattr(self.model, "hf_device_map", {}).values())  # there is none where all fits
        return {**super().describe(), "modules_on_disk": places.count("disk"), "modules_in_ram": places.count("cpu"),
                "modules": len(places)}  # fmt: skip

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


def write_offload_folder(model: Path, folder: Path) -> None:
    """All weights of the model as ``disk_offload`` reads them."""
    from accelerate.utils import offload_state_dict

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    offload_state_dict(folder, loaded.state_dict())


def _greedy(model: Any) -> Any:
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = None
    return model.eval()
