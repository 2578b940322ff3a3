"""How kinds are made from live traces: when they are due, in a process of their own, published and tried again."""
