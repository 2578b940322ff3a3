"""Task types by a linear head on words of a prompt's instruction."""

from greenroom.tasktype.linear.extractor import LinearExtractor
from greenroom.tasktype.linear.features import InstructionFeatures
from greenroom.tasktype.linear.weights import Weights, load_weights, parse_weights

__all__ = ["InstructionFeatures", "LinearExtractor", "Weights", "load_weights", "parse_weights"]
