"""Checkpoints of other software, in and out."""
