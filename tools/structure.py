"""Count the code and draw who imports whom: the table and the picture of docs/architecture.md.

    python -m tools.structure

Both come from the source files alone, so they cannot go stale. Blank lines, comments and docstrings do not count.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

from matplotlib.figure import Figure

from common.console import say
from common.figures import png
from common.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("train", "eval", "sample", "scripts")
PLACES = {  # rooms, with x and y of their boxes: a row is below all that may import it
    "commands": (1, 6),
    "inference.server": (1, 5.1),
    "tools": (2.4, 5.5),
    "cli": (0, 4),
    "inference": (1.75, 4),
    "trainer": (1.7, 3),
    "data.prepare": (0.4, 3),
    "data": (0.9, 2),
    "model": (2.1, 2),
    "model.ops": (2.1, 1),
    "common": (0.9, 0),
}
CORE = {"cli", "trainer", "data.prepare", "data", "model", "model.ops", "common"}
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def main() -> None:
    """Write docs/architecture.png, and print the table."""
    say(table(lines_by_room()))
    write_atomic(ROOT / "docs" / "architecture.png", picture(imports_by_room()))


def room_of(name: str) -> str | None:
    """The room of a module ("data.prepare.merge") or a file (data/loader.py), or None."""
    module = name.removesuffix(".py").replace("/", ".")
    if module.partition(".")[0] in COMMANDS:
        return "commands"
    return max((room for room in PLACES if f"{module}.".startswith(f"{room}.")), key=len, default=None)


def files() -> dict[Path, str]:
    """Every source file of the project, without its tests, and its room."""
    patterns = [f"{name}{ending}" for name in (*COMMANDS, *PLACES) for ending in (".py", "/**/*.py")]
    paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return {path: str(room_of(str(path.relative_to(ROOT)))) for path in sorted(paths)}


def lines_of_code(source: str) -> int:
    """Lines that are not blank, comments or docstrings."""
    documentation = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {n for t in tokens if t.type not in NOT_CODE for n in range(t.start[0], t.end[0] + 1)}
    return len(code - documentation)


def lines_by_room() -> dict[str, int]:
    """Lines of code of each room."""
    lines = dict.fromkeys(PLACES, 0)
    for path, room in files().items():
        lines[room] += lines_of_code(path.read_text(encoding="utf-8"))
    return lines


def imports_by_room() -> set[tuple[str, str]]:
    """Pairs (a, b) where room a imports room b, by an import statement or by a name such as "module:function"."""
    arrows = set()
    for path, room in files().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom():
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                case ast.Constant(value=str(text)) if re.fullmatch(r"\w+(\.\w+)+:\w+", text):
                    names = [text.replace(":", ".")]
                case _:
                    continue
            arrows |= {(room, str(other)) for other in {room_of(name) for name in names} - {room, None}}
    return arrows


def table(lines: dict[str, int]) -> str:
    """The lines of each room as a Markdown table, with sums."""
    core = sum(n for room, n in lines.items() if room in CORE)
    rows = [*lines.items(), ("core (cli, trainer, data, model, common)", core), ("all", sum(lines.values()))]
    return "\n".join(["| package | lines of code |", "|---|---|", *(f"| {room} | {n:,} |" for room, n in rows)])


def shown(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Drop arrows into common, which everything may import, and arrows that follow from others."""
    arrows = {(start, end) for start, end in arrows if end != "common"}

    def leads(start: str, end: str) -> bool:
        return (start, end) in arrows or any(leads(middle, end) for first, middle in arrows if first == start)

    return {
        (start, end)
        for start, end in arrows
        if not any(leads(middle, end) for first, middle in arrows if first == start and middle != end)
    }


def picture(arrows: set[tuple[str, str]]) -> bytes:
    """Boxes for the rooms, and arrows from each to those it imports."""
    figure = Figure(figsize=(8, 6))
    axes = figure.subplots()
    axes.set_xlim(-0.4, 2.6)
    axes.set_ylim(-0.5, 6.5)
    axes.axis("off")
    boxes = {}
    for room, (x, y) in PLACES.items():
        color = "#eaf1fb" if room in CORE else "#f7f3e8"
        box = {"boxstyle": "round,pad=0.6", "facecolor": color, "edgecolor": "#444444"}
        boxes[room] = axes.text(x, y, room, ha="center", va="center", fontsize=12, bbox=box, zorder=3).get_bbox_patch()
    for start, end in sorted(shown(arrows)):
        ends = {"patchA": boxes[start], "patchB": boxes[end], "shrinkA": 0, "shrinkB": 2}
        arrow = {"arrowstyle": "-|>", "color": "#666666", "lw": 1.5, "mutation_scale": 16}
        axes.annotate("", PLACES[end], PLACES[start], arrowprops=arrow | ends)
    return png(figure)


if __name__ == "__main__":
    main()
