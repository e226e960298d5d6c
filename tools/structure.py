"""Draw who imports whom, from the source files: the picture of docs/architecture.md.

python -m tools.structure
"""

import ast
import re
from pathlib import Path

from matplotlib.figure import Figure

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


def main() -> None:
    """Write docs/architecture.png."""
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
