"""Task-type extraction: what kind of task each request describes (eMoE, section 3.2.1)."""

from greenroom.tasktype.config import TaskTypeConfig
from greenroom.tasktype.extractor import UNKNOWN, Extraction, Extractor
from greenroom.tasktype.metrics import TaskTypeMetrics
from greenroom.tasktype.open_extractor import DEFAULT_EXTRACTOR, EXTRACTORS, SHIPPED_EXTRACTORS, open_extractor
from greenroom.tasktype.service import TaskTypeService

__all__ = [
    "DEFAULT_EXTRACTOR",
    "EXTRACTORS",
    "SHIPPED_EXTRACTORS",
    "UNKNOWN",
    "Extraction",
    "Extractor",
    "TaskTypeConfig",
    "TaskTypeMetrics",
    "TaskTypeService",
    "open_extractor",
]
