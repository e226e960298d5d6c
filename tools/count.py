"""Counts the project's lines, tokens and files, and compares them with its budget."""

import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "tests" / "budget.yaml"
PACKAGES = ("model", "runtime", "trainer", "data", "inference", "tools", "cli", "common", "scripts")
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def count(source: str) -> Counter[str]:
    """Count a Python file's lines and tokens, without blank lines, comments and docstrings."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens, opened = [], []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        # Python 3.12 and later give an f-string in parts. It counts as one token, as before.
        if kind == "FSTRING_START":
            opened.append(token.start)
        if kind == "FSTRING_END":
            token = token._replace(start=opened.pop())
        if not opened and kind not in LAYOUT and token.start[0] not in docstrings:
            tokens.append(token)
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return Counter(files=1, lines=len(lines), tokens=len(tokens))


def counted() -> dict[str, Counter[str]]:
    """Return what each package has, and "code", "tests" and "pages"."""
    found = {name: Counter[str]() for name in (*PACKAGES, "code", "tests", "pages")}
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    ).splitlines()
    for path in (Path(name) for name in listed if (ROOT / name).is_file()):
        source, package = ROOT / path, path.parts[0] if path.parent.name else "scripts"
        if path.suffix == ".py" and package in found:
            found[package] += count(source.read_text(encoding="utf-8"))
        elif path.suffix == ".md" and package in ("docs", "scripts"):
            found["pages"] += Counter(
                files=1, lines=len(source.read_text(encoding="utf-8").splitlines())
            )
    found["code"] = sum((found[name] for name in PACKAGES), Counter[str]())
    return found


def excesses() -> list[str]:
    """Say what is above the budget, a line each."""
    budget = yaml.safe_load(BUDGET.read_text(encoding="utf-8"))
    limits = dict.fromkeys(PACKAGES, budget.pop("package")) | budget
    lines = []
    for name, counts in counted().items():
        for unit, limit in limits[name].items():
            have = density(counts) if unit == "tokens_per_line" else counts[unit]
            if have > limit:
                lines.append(f"{name} has {have:,.6g} {unit}, and at most {limit:,} are allowed")
    return lines


def density(counts: Counter[str]) -> float:
    """Return tokens per line."""
    return counts["tokens"] / max(1, counts["lines"])


def report() -> None:
    """Print the counts of each package, and what is above the budget."""
    print(f"{'':10}{'files':>7}{'lines':>9}{'tokens':>9}{'a line':>8}")
    for name, have in counted().items():
        tokens = f"{have['tokens']:9,}{density(have):8.2f}" if have["tokens"] else ""
        print(f"{name:10}{have['files']:7,}{have['lines']:9,}{tokens}")
    for line in excesses():
        print(line)
