"""Training: the loop and everything around it, for every model and task."""
