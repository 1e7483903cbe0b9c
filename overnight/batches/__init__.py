"""Shards to batches: order, pairs, masks and packing, each a function of seed, epoch and sample."""
