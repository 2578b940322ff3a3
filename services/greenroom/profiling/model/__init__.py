"""The model while it is profiled: run on prompts, forced to given answers, confined to some experts."""
