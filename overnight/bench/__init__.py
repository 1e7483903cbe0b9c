"""Benchmarks with their peers, run by `overnight bench`."""
