"""Public text and tasks, got from where they are published or from a mirror, resumed, checked and recorded."""
