"""OpenAI's HTTP API: routes, exchanges, bodies, streams of events."""
