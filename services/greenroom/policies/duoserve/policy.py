"""DuoServe: what a token picked in earlier layers foresees what it picks in the next ones."""

from __future__ import annotations

from greenroom.policies.base.events import ROUTER
from greenroom.policies.foresight.blended_reuse import BlendedReuse
from greenroom.policies.foresight.path_weights import PATH
from greenroom.policies.reuse.chances import REUSE


class DuoServe(BlendedReuse):
    """``BlendedReuse`` by what each token picked in earlier layers and by routers run ahead (DuoServe-MoE, section 4).

    A layer that misses many passes them through a few slots (§5.2), so a prompt leaves most residents where they are.
    Who stays is chosen among all residents and all that pass. In a step with prompts the later layers' experts are as
    good as certain to be used; those of layers that have run wait for the running sequences' next tokens.
    """

    asks = frozenset({ROUTER, PATH})
    artifacts = frozenset({REUSE, PATH})
