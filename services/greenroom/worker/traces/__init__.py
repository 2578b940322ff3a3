"""The routing of finished sequences, for the topic traces."""
