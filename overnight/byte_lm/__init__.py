"""What a byte-level language model is used for after pretraining."""
