"""Checkpoints: reading, writing, and which run they belong to."""
