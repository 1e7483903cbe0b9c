"""Yardsticks of masked-LM encoders, the same for our networks and those of others."""
