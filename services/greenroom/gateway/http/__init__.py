"""OpenAI's HTTP API: endpoints, middleware, streams of events, the schema."""
