"""Which requests can ever be served: by the model's vocabulary and context, and by what the KV budget holds."""

from __future__ import annotations

from collections.abc import Collection

from greenroom.core.errors import BudgetTooSmall, InvalidConfig, InvalidRequest
from greenroom.core.generation import GenerationRequest
from greenroom.core.units import format_bytes
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.forward.ragged_model import RaggedModel


class RequestLimits:
    """``max_model_len``: how many tokens a request may have, prompt and answer together. Raises BudgetTooSmall or
    InvalidConfig."""

    def __init__(self, model: RaggedModel, config: BatchConfig, kv: KVStore, *, stops: bool) -> None:
        """``stops``: whether stop strings can be checked."""
        self.max_model_len = _max_model_len(model, config, kv)
        self._vocab_size = model.vocab_size
        self._kv_rows = kv.max_rows
        self._kv_budget_bytes = config.kv_budget_bytes
        self._stops = stops

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest, which names the field, for a request that can never be served here."""
        sampling, prompt = request.sampling, len(request.prompt_ids)
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        self._check_ids(request.prompt_ids, "prompt")
        if request.prefix:
            self._check_ids([token.token_id for token in request.prefix], "prefix")
            if any(token.index != place for place, token in enumerate(request.prefix)):
                raise InvalidRequest(
                    "the prefix holds the answer's tokens from index 0 on, without gap", param="prefix"
                )
        if sampling.logit_bias:
            self._check_ids([token_id for token_id, _ in sampling.logit_bias], "logit_bias")
        total = prompt + (1 if sampling.max_tokens is None else sampling.max_tokens)
        if total > self.max_model_len:
            asked = "1 for the answer" if sampling.max_tokens is None else f"max_tokens={sampling.max_tokens}"
            raise InvalidRequest(
                f"a request may have {self.max_model_len} tokens in all{self._why_so_few()}; this one has {prompt} in"
                f" the prompt and {asked}",
                param="prompt" if prompt >= self.max_model_len else "max_tokens",
                code="context_length_exceeded",
            )
        if sampling.stop and not self._stops:
            raise InvalidRequest("stop strings need a tokenizer, and there is none here", param="stop")

    def _check_ids(self, ids: Collection[int], param: str) -> None:
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise InvalidRequest(f"token ids are from 0 to {self._vocab_size - 1}", param=param)

    def _why_so_few(self) -> str:
        if self._kv_rows + 1 > self.max_model_len:
            return ""
        return f" (the KV budget of {format_bytes(self._kv_budget_bytes)} holds no more)"


def _max_model_len(model: RaggedModel, config: BatchConfig, kv: KVStore) -> int:
    fits = kv.max_rows + 1  # the last generated token is not kept
    wanted = config.max_model_len
    if wanted is not None and wanted > model.max_positions:
        raise InvalidConfig("max_model_len", wanted, f"the model takes at most {model.max_positions}")
    if fits < (wanted or 2):
        needs = kv.layout.nbytes((wanted or 2) - 1)
        raise BudgetTooSmall(
            f"a KV budget of {format_bytes(config.kv_budget_bytes)} holds {max(fits, 0)} tokens of"
            f" {kv.layout.bytes_per_token} bytes; a request of {wanted or 2} needs {format_bytes(needs)}:"
            " give more to --kv-memory, or a shorter --max-model-len"
        )
    return min(wanted or model.max_positions, fits)
