"""What foretells routing paths, out of its file: one class for each form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import T5
from greenroom.core.artifacts.paths_forms.tables import TABLES
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.expertflow.t5_paths import T5Paths
from greenroom.policies.expertflow.token_tables import Past, TokenTables

_MAKERS: Final[Mapping[str, Callable[[PathsFile, Catalogue, Past | None], TokenPaths]]] = {
    TABLES: TokenTables,
    T5: T5Paths,
}
"""By form. A further one is a line here."""


def paths_of_file(
    file: PathsFile, catalogue: Catalogue, *, past: Past | None = None, vocabulary: int | None = None
) -> TokenPaths:
    """``past``: ``ExpertPolicy.past_logits`` of the policy beside it. ``vocabulary``: how many token ids the model has.
    Takes long where tables are large. Raises InvalidConfig for a file of another model or vocabulary.
    """
    file.check_model(tuple(catalogue.experts_per_layer.tolist()), vocabulary)
    return _MAKERS[file.form](file, catalogue, past)
