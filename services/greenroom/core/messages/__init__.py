"""The records of the topics: msgpack maps with a schema version and a kind. docs/architecture/topics.md lists them."""

from greenroom.core.messages.codec import Message, Undecodable, decode, encode
from greenroom.core.messages.dead_letters import DeadLetter, without_payload
from greenroom.core.messages.inferences import Inference
from greenroom.core.messages.journal import Claim, JournalRecord, Lost, Outcome, TokenLogprobArrays
from greenroom.core.messages.members import Member, MemberKind, ModelCard, QueueDepth
from greenroom.core.messages.requests import Cancel, Request
from greenroom.core.messages.tasks import Rejected, Task, TaskRecord
from greenroom.core.messages.traces import Trace

AcceptedRequest = Request | Inference
"""What ``tasks`` wraps."""
RequestRecord = Request | Inference | Cancel

__all__ = [
    "AcceptedRequest",
    "Cancel",
    "Claim",
    "DeadLetter",
    "Inference",
    "JournalRecord",
    "Lost",
    "Member",
    "MemberKind",
    "Message",
    "ModelCard",
    "Outcome",
    "QueueDepth",
    "Rejected",
    "Request",
    "RequestRecord",
    "Task",
    "TaskRecord",
    "TokenLogprobArrays",
    "Trace",
    "Undecodable",
    "decode",
    "encode",
    "without_payload",
]
