"""What a run records beside its checkpoints, and what it prints."""
