"""All that a front door needs of a checkpoint's text: its tokenizer and, where it has one, its chat template."""

from __future__ import annotations

from pathlib import Path

from greenroom.core.errors import CorruptCheckpoint, InvalidRequest
from greenroom.text.chat import ChatTemplate
from greenroom.text.files import TEMPLATE_FILE, TextFiles
from greenroom.text.model_text import text_files_of
from greenroom.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from greenroom.text.tokenizer import Tokenizer


class TextProcessor:
    """``tokenizer`` always; a chat template only if the checkpoint has one, see ``chat``. ``folder``: the checkpoint's,
    or a GGUF file, None where there is none."""

    def __init__(
        self, tokenizer: Tokenizer, chat: ChatTemplate | None, *, why_no_chat: str = "", folder: Path | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._folder = folder
        self._chat = chat
        self._why_no_chat = why_no_chat

    @classmethod
    def from_folder(cls, folder: str | Path) -> TextProcessor:
        """Reads the checkpoint in ``folder``, or a GGUF file. A missing or broken chat template is no error before it
        is needed.

        Raises CorruptCheckpoint, UnsupportedModel.
        """
        files = text_files_of(Path(folder))
        tokenizer = Tokenizer(files, name=str(folder))
        try:
            return cls(tokenizer, _chat_template(files), folder=Path(folder))
        except CorruptCheckpoint as error:
            return cls(tokenizer, None, why_no_chat=str(error), folder=Path(folder))

    def sampling_defaults(self) -> SamplingDefaults:
        """What the checkpoint says of sampling. Reads its file. Raises CorruptCheckpoint."""
        return NO_DEFAULTS if self._folder is None else read_sampling_defaults(self._folder)

    @property
    def has_chat(self) -> bool:
        return self._chat is not None

    @property
    def chat(self) -> ChatTemplate:
        """Raises InvalidRequest, saying what to do instead, where the model has no usable chat template."""
        if self._chat is None:
            of_file = self._folder is not None and self._folder.is_file()
            other = (
                "serve a GGUF file that has one, as tokenizer.chat_template"
                if of_file
                else f"put a {TEMPLATE_FILE} beside the model's tokenizer.json"
            )
            raise InvalidRequest(
                f"{self._why_no_chat}; use /v1/completions, or {other}",
                param="messages",
                code="no_chat_template",
            )
        return self._chat


def _chat_template(files: TextFiles) -> ChatTemplate:
    if not files.templates:
        raise CorruptCheckpoint("this model has no chat template")
    if "default" not in files.templates:
        known = ", ".join(sorted(files.templates))
        raise CorruptCheckpoint(f"this model has chat templates, but none of them is named default (they are: {known})")
    return ChatTemplate(files.templates["default"], files.named)
