"""llama.cpp with its tokens forced on it, through the low-level API of llama-cpp-python.

Runs within a child process, in that package's own environment. All sequences of a batch are decoded in one
`llama_decode` a step.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.children.process_memory import mapped_bytes, memory, read_bytes
from benchmarks.peers.batch import Batch, Decoded, batch_of

_ROWS = 512
"""Most rows of a `llama_decode`, and of one of its physical batches."""

_LOAD_MODES = {"none": 0, "mmap": 1}
_LOG_ERROR = 4
Row = tuple[int, int, int, bool]
"""Token, position, sequence, whether its logits are wanted."""


class LlamaFailed(Exception):
    """llama.cpp said no; the message is its own."""


class Llama:
    """A loaded model. Pointers of llama.cpp's are freed by ``close``."""

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.settings = settings
        self.log: deque[str] = deque(maxlen=3)
        self._callback = llama_cpp.llama_log_callback(self._logged)  # must outlive all calls
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.load_mode = _LOAD_MODES[settings["load_mode"]]
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = settings["repack"]
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not self.model:
            raise LlamaFailed(f"the model can not be loaded: {' '.join(self.log)}")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def decode(self, batch: Batch) -> Decoded:
        """The prompts, then one row a sequence and step, as long as the forced tokens go."""
        context = self._context(batch.sequences)
        rows = self.lib.llama_batch_init(_ROWS, 0, 1)
        try:
            return self._decode(context, rows, batch)
        finally:
            self.lib.llama_batch_free(rows)
            self.lib.llama_free(context)

    def _context(self, sequences: int) -> Any:
        settings = self.settings
        parameters = self.lib.llama_context_default_params()
        parameters.n_ctx = sequences * settings["max_model_len"]
        parameters.n_batch = parameters.n_ubatch = _ROWS
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = settings["threads"]
        parameters.flash_attn_type = int(settings["flash_attention"])
        parameters.kv_unified = settings["unified_kv"]
        parameters.no_perf = True
        context = self.lib.llama_init_from_model(self.model, parameters)
        if not context:
            raise LlamaFailed(f"no context: {' '.join(self.log)}")
        return context

    def _decode(self, context: Any, rows: Any, batch: Batch) -> Decoded:
        begin = time.perf_counter()
        greedy: list[list[int]] = [[] for _ in batch.prompts]
        arrivals: list[list[float]] = [[] for _ in batch.prompts]

        def picked(tokens: dict[int, int]) -> None:
            now = time.perf_counter() - begin
            for sequence, token in tokens.items():
                greedy[sequence].append(token)
                arrivals[sequence].append(now)

        prompt_rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(batch.prompts)
            for position, token in enumerate(prompt)
        ]
        for first in range(0, len(prompt_rows), _ROWS):
            picked(self._step(context, rows, prompt_rows[first : first + _ROWS]))
        read = read_bytes()
        for step in range(len(batch.forced[0]) - 1):
            positions = (len(prompt) + step for prompt in batch.prompts)
            row = [(batch.forced[n][step], position, n, True) for n, position in enumerate(positions)]
            picked(self._step(context, rows, row))
        return Decoded(tuple(map(tuple, arrivals)), tuple(map(tuple, greedy)), read_bytes() - read)

    def _step(self, context: Any, batch: Any, rows: Sequence[Row]) -> dict[int, int]:
        """One `llama_decode`; returns the likeliest token of each sequence whose logits were wanted."""
        batch.n_tokens = len(rows)
        for place, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = wanted
        answer = self.lib.llama_decode(context, batch)
        if answer != 0:
            raise LlamaFailed(f"llama_decode answered {answer}: {' '.join(self.log)}")
        found = {}
        for place, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(context, place), (self.vocabulary,))
                found[sequence] = int(logits.argmax())
        return found

    def _logged(self, level: int, text: bytes, _: object) -> None:
        if level == _LOG_ERROR:
            self.log.append(text.decode(errors="replace").strip())

    def close(self) -> None:
        self.lib.llama_model_free(self.model)
        self.lib.llama_backend_free()


class ForcedLlama:
    """``settings``: ``load_mode`` (mmap, none), ``threads``, ``flash_attention``, ``unified_kv``, ``max_model_len``."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self._path = Path(model)
        self._llama = Llama(model, settings)
        self._load_s = time.perf_counter() - begin

    def describe(self) -> dict[str, Any]:
        lib = self._llama.lib
        system = lib.llama_print_system_info().decode().strip()
        return {"load_s": self._load_s, "version": lib.__version__, "system": system}

    def decode(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """One batch after the other, each in a context of its own."""
        decoded = [asdict(self._llama.decode(batch_of(batch))) for batch in batches]
        return {"batches": decoded, **memory(), "mapped_bytes": mapped_bytes(self._path)}

    def close(self) -> None:
        self._llama.close()
