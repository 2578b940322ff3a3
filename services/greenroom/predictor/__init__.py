"""The predictor: which experts the next prompts will need, learnt from the routing of finished sequences."""

from greenroom.predictor.config import PredictorConfig
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.service import PredictorService
from greenroom.predictor.servicer import PredictorServicer

__all__ = ["PredictorConfig", "PredictorMetrics", "PredictorService", "PredictorServicer"]
