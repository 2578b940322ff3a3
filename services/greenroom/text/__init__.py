"""Text to tokens and back, from a checkpoint's folder, with tokenizers and jinja2 alone."""

from greenroom.text.chat import ChatTemplate
from greenroom.text.detokenize import Detokenizer
from greenroom.text.processor import TextProcessor
from greenroom.text.stops import StopChecker, StopMatcher, TextStream
from greenroom.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopChecker",
    "StopMatcher",
    "TextProcessor",
    "TextStream",
    "Tokenizer",
]
