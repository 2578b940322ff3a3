"""From a call to the requests that it has in flight in the pipeline."""
