"""How an expert's weights lie in its record: a file a format."""
