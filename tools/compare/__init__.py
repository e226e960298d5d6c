"""Comparisons of attention mechanisms: scripts/compare_attention.py on text, scripts/recall.py on recall tasks."""
