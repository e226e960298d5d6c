"""The comparison of attention mechanisms: scripts/compare_attention.py."""
