"""What is measured and drawn of operators and decoding: scripts/bench_*.py, draw_attention.py, inspect_kernels.py."""
