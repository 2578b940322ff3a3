"""Routers: their logits observed, masked, and predicted for later layers."""
