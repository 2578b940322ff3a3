"""The members that a gateway hears of."""

from __future__ import annotations

from greenroom.core.messages import Member, MemberKind, ModelCard


class Members:
    def __init__(self) -> None:
        self.here: list[Member] = []

    def of(self, kind: MemberKind, pool: int | None = None) -> list[Member]:
        return [member for member in self.here if member.member is kind]


def worker(name: str, *, text: str = "ours", length: int = 100) -> Member:
    card = ModelCard(name="m", digest="d", text_digest=text, max_model_len=length, vocab_size=9)
    return Member(member=MemberKind.WORKER, instance=name, address="", ttl_ms=1000, model=card)
