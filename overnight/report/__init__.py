"""Metrics of runs to one HTML page. Nothing here imports torch."""
