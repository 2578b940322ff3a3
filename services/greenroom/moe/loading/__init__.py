"""From a checkpoint to a model that runs on experts held elsewhere."""
