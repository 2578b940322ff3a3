"""All that the HTTP API answers, as it is written: each struct is encoded as it stands, and makes the schema."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

FinishWord = Literal["stop", "length"]


class ErrorDetail(Struct, kw_only=True):
    """``code`` is a stable word for programs. ``param`` is the field at fault, null where no field is."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, kw_only=True):
    """What is answered instead of a reply."""

    error: ErrorDetail


class Usage(Struct, kw_only=True):
    """In tokens. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AlternativeToken(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(AlternativeToken, kw_only=True):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(Struct, kw_only=True):
    content: list[ChosenToken]
    refusal: None


class ReplyMessage(Struct, kw_only=True):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord


Share = Annotated[float, Meta(ge=0, le=1)]


class ChatCompletion(Struct, kw_only=True):
    """The reply as a whole.

    ``approximated``: of all times that a layer's router chose experts for a token of the prompt or the answer, the
    share where it was kept from those it would have chosen, since they were not in memory. Left out where it is not
    known.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    approximated: Share | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None


class ChatCompletionChunk(Struct, kw_only=True):
    """The data of one event of a stream. The part with the usage of the whole has ``approximated`` too."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    approximated: Share | UnsetType = UNSET


class CompletionLogprobs(Struct, kw_only=True):
    """One entry a token. Before the first token of a prompt that is echoed there is nothing: it has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None


class TextCompletion(Struct, kw_only=True):
    """The reply as a whole, or, without ``usage`` and ``approximated``, the data of one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    approximated: Share | UnsetType = UNSET


class Model(Struct, kw_only=True):
    """``max_model_len``: tokens of prompt and answer together. ``root``: the model's id on the hub, where it has one,
    else the served name. ``parent``: always null, since there are no adapters."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | UnsetType = UNSET


class ModelList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[Model]


class Condition(Struct, kw_only=True):
    status: Literal["ready", "live"]


class Tokenized(Struct, kw_only=True):
    """``token_strs``: the tokens as the vocabulary writes them, where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct, kw_only=True):
    prompt: str


class Version(Struct, kw_only=True):
    version: str


REPLIES = (
    ErrorBody,
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    Model,
    ModelList,
    Condition,
    Tokenized,
    Detokenized,
    Version,
)
