"""A trained encoder at work: its answers and its embeddings, from Python, the command line and over HTTP."""
