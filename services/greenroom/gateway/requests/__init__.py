"""From a call to sequences on their way through the pipeline."""
