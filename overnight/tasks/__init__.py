"""Readers of labeled data: tables, GLUE, SST, IMDB, SQuAD, CoNLL (no torch)."""
