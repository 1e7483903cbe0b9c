"""Many processes: who they are, what they exchange, how they start and end."""
