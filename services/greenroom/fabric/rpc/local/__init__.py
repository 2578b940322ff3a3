"""Calls within the process: the in-process twin of gRPC."""
