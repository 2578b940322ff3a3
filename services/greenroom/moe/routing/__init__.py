"""Routers: their logits seen, confined, and run ahead."""
