"""The measurements of scripts/bench.py, and what other tools share with them."""
