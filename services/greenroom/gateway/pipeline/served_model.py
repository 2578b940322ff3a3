"""The model that a pool's workers say they serve."""

from __future__ import annotations

from greenroom.core.generation import ServedModel
from greenroom.core.messages import Member, MemberKind, ModelCard
from greenroom.fabric.members import Directory
from greenroom.gateway.errors import unavailable

_NOT_KNOWN = "no worker has said yet which model it serves"


class PoolModel:
    """``text_digest``: of the tokenizer in use here; a worker with another one is ignored. None: any will do."""

    def __init__(self, directory: Directory, pool: int, text_digest: str | None) -> None:
        self._directory = directory
        self._pool = pool
        self._text_digest = text_digest
        self._workers: list[Member] = []
        """Those that ``_card`` and ``_stranger`` were found from."""
        self._card: ModelCard | None = None
        self._stranger: str | None = None
        self._served: tuple[ModelCard, ServedModel] | None = None
        """What ``served`` returned last, and the card that it is of: it is asked several times for each request."""

    def served(self) -> ServedModel:
        """Raises ApiError (503) before a worker has said what it serves."""
        card = self._common_card()
        if card is None:
            raise unavailable(_NOT_KNOWN, "not_ready")
        if self._served is None or self._served[0] is not card:
            self._served = (
                card,
                ServedModel(
                    card.name, card.max_model_len, card.vocab_size, card.eos_token_ids, card.created, card.collaboration
                ),
            )
        return self._served[1]

    @property
    def unready(self) -> str | None:
        """Why there is no model to serve; None where there is one."""
        return None if self._common_card() is not None else self._stranger or _NOT_KNOWN

    def _common_card(self) -> ModelCard | None:
        """What all of the pool's workers can serve. Where there is no worker: what was known last."""
        workers = self._directory.of(MemberKind.WORKER, pool=self._pool)
        if workers == self._workers:
            return self._card
        self._workers = workers
        cards = [worker.model for worker in workers if worker.model is not None]
        ours = [card for card in cards if self._text_digest in (None, card.text_digest)]
        if ours:
            self._card = min(ours, key=lambda card: card.max_model_len)
        elif cards:
            self._stranger = (
                f"the pool's workers serve {cards[0].name}, whose tokenizer is another than the one here; start the "
                "gateway with the same --model"
            )
        return self._card
