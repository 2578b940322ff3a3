"""What arms run on: checkpoints, loaded models, prompts, arrivals, recorded routing."""
