"""Fine-tuning an encoder on labeled tasks, and prediction with it."""
