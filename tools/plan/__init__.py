"""What a training run will take: scripts/plan.py."""
