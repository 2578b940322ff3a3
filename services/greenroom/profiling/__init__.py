"""What a model is like, by task type: ``greenroom profile``. docs/architecture/profiles.md describes the file."""
