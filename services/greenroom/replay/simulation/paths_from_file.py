"""Routing paths of a replay, foretold from its tokens by a file."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.expertflow.paths_of_file import paths_of_file
from greenroom.policies.expertflow.policy import PATHS
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.token_numbers import texts_digest, tokens_of


@dataclass(frozen=True, slots=True)
class PathsFromFile:
    """As ``TimedReplay.paths``: for the policies that predict by them."""

    file: PathsFile

    def __call__(self, policy: ExpertPolicy, trace: RoutingTrace) -> TokenPaths | None:
        if PATHS not in policy.artifacts:
            return None
        return paths_of_file(self.file, policy.catalogue, past=policy.past_logits)

    def check(self, trace: RoutingTrace) -> None:
        """Raises TraceError for a trace without tokens, InvalidConfig where the file was made of other tokens."""
        tokens_of(trace)
        self.file.check_model(tuple(trace.experts_per_layer.tolist()))
        made_of, texts = self.file.numbered_texts, texts_digest(trace)
        if made_of == texts:
            return
        if not made_of:
            raise InvalidConfig(PATHS, "ids of a model", "a file made from this trace alone, whose tokens are texts")
        if not texts:
            raise InvalidConfig(PATHS, "numbers of texts", "a file made from ids of the model, as this trace has them")
        allowed = "a file made from this trace alone; this one was made from other texts, or from several traces"
        raise InvalidConfig(PATHS, "numbers of other texts", allowed)
