"""The run folder: its lock, its metrics and other files that are whole or absent."""
