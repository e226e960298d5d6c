"""Print the project's lines, tokens and files by package, beside its budget in tests/budget.yaml.

    python scripts/count.py

Python files are counted, without blank lines, comments and docstrings. Tokens are those of Python's tokenizer.
Pages are README, CHANGELOG, CONTRIBUTING and docs/, with all their lines.
"""

from common.command import Settings, run_script

if __name__ == "__main__":
    run_script(__doc__, Settings, "tools.count:report")
