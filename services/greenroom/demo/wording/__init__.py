"""How each task type is put into English: one builder a task, each drawing facts, a wording and the answer.

A builder takes a `random.Random` and returns a `Draft`. The facts are drawn before the wording, and the `key` names
what is new about the sample (never its wording), so that a split by key keeps whole contents out of training.
"""

from greenroom.demo.wording.base import Draft
from greenroom.demo.wording.classify import classify
from greenroom.demo.wording.compare import compare
from greenroom.demo.wording.converse import converse
from greenroom.demo.wording.question import question
from greenroom.demo.wording.summarise import summarise

__all__ = ["Draft", "classify", "compare", "converse", "question", "summarise"]
