"""The measurements behind scripts/bench_*.py and scripts/inspect_kernels.py."""
