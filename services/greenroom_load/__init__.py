"""greenroom-load: traffic for language model servers, and what became of it.

It talks to anything with OpenAI's HTTP API, and to greenroom's gRPC API. docs/architecture/loadgen.md says what is
measured and how.
"""
