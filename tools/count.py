"""scripts/count.py: counts the project's files, lines and tokens beside its budget."""

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


def count_source(source: str) -> Counter[str]:
    """Count a Python file's lines and tokens, without blank lines, comments and docstrings."""
    docstrings: set[int] = set()  # their lines
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())):
                docstrings |= _lines_of(node.lineno, node.end_lineno)
    n_tokens = 0
    lines: set[int] = set()
    opened = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        # Python 3.12 and later split an f-string into tokens. It counts as one, as in 3.11.
        if kind == "FSTRING_START":
            opened.append(token.start)
        if kind == "FSTRING_END":
            token = token._replace(start=opened.pop())
        if not opened and kind not in LAYOUT and token.start[0] not in docstrings:
            n_tokens += 1
            lines |= _lines_of(token.start[0], token.end[0])
    return Counter(files=1, lines=len(lines), tokens=n_tokens)


def _lines_of(first: int, last: int | None) -> set[int]:
    return set(range(first, (last or first) + 1))


def count_packages() -> dict[str, Counter[str]]:
    """Return what each package has, and "code", "tests" and "pages"."""
    counts = {name: Counter[str]() for name in (*PACKAGES, "code", "tests", "pages")}
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        path = Path(name)
        if path.suffix not in (".py", ".md") or not (ROOT / path).is_file():
            continue
        # train.py, eval.py and sample.py count as scripts, and README.md as a page.
        package = path.parts[0] if path.parent.name else "scripts"
        source = (ROOT / path).read_text(encoding="utf-8")
        if path.suffix == ".py" and package in counts:
            counts[package] += count_source(source)
        elif path.suffix == ".md" and package in ("docs", "scripts"):
            counts["pages"] += Counter(files=1, lines=len(source.splitlines()))
    for name in PACKAGES:
        counts["code"] += counts[name]
    return counts


def find_excesses() -> list[str]:
    """Return a line for each number that is above the budget."""
    budget = yaml.safe_load(BUDGET.read_text(encoding="utf-8"))
    limits = dict.fromkeys(PACKAGES, budget.pop("package")) | budget
    lines = []
    for name, counts in count_packages().items():
        for unit, limit in limits[name].items():
            number = tokens_per_line(counts) if unit == "tokens_per_line" else counts[unit]
            if number > limit:
                lines.append(f"{name} has {number:,.6g} {unit}, and at most {limit:,} are allowed")
    return lines


def tokens_per_line(counts: Counter[str]) -> float:
    """Return tokens per line."""
    return counts["tokens"] / max(1, counts["lines"])


def print_counts() -> None:
    """Print the counts of each package, and what is above the budget."""
    print(f"{'':10}{'files':>7}{'lines':>9}{'tokens':>9}{'a line':>8}")
    for name, counts in count_packages().items():
        tokens = f"{counts['tokens']:9,}{tokens_per_line(counts):8.2f}" if counts["tokens"] else ""
        print(f"{name:10}{counts['files']:7,}{counts['lines']:9,}{tokens}")
    for line in find_excesses():
        print(line)
