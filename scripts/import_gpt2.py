"""Start from GPT-2's weights: python scripts/import_gpt2.py folder=gpt2 run_dir=runs/gpt2."""

from cli import command

if __name__ == "__main__":
    message = "interrupted; choose another run_dir, or remove this one"
    command("import_gpt2", "tools.convert.import_gpt2:import_gpt2", when_interrupted=message)
