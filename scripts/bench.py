"""Time operators, training, decoding and preparation.

python scripts/bench.py what=train models=flagship_10m
"""

from cli import command

if __name__ == "__main__":
    lists = ("what", "lengths", "models", "set", "positions")
    command(
        "bench", "tools.bench.run:run_benchmarks", "tools.bench.run:BenchConfig", text_keys=lists
    )
