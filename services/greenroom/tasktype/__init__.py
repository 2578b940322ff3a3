"""Task-type extraction: what kind of task each request describes (eMoE, section 3.2.1)."""

from greenroom.tasktype.config import TaskTypeConfig
from greenroom.tasktype.extractor import Extraction, Extractor
from greenroom.tasktype.metrics import TaskTypeMetrics
from greenroom.tasktype.profile import UNKNOWN, Profile, load_profile, parse_profile
from greenroom.tasktype.service import TaskTypeService

__all__ = [
    "UNKNOWN",
    "Extraction",
    "Extractor",
    "Profile",
    "TaskTypeConfig",
    "TaskTypeMetrics",
    "TaskTypeService",
    "load_profile",
    "parse_profile",
]
