"""One model in this process: its memory plan, its engine, what is told of it."""
