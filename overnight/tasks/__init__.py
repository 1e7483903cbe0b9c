"""Fine-tuning tasks, their metrics, and prediction."""
