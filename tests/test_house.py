"""Allowed imports, links, lengths of lines and sizes. Calls that are forbidden are in pyproject.toml, for ruff."""

import ast
import functools
import re
from pathlib import Path

import pytest
from mutations import MUTATIONS, mutated

from tools.count import find_excesses

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cli", "common", "data", "inference", "model", "runtime", "tools", "trainer")
ENTRY_POINTS = ["train.py", "eval.py", "sample.py"]
FILES = sorted(
    path.relative_to(ROOT)
    for path in [
        *(ROOT / name for name in ENTRY_POINTS),
        *(path for folder in (*PACKAGES, "scripts") for path in (ROOT / folder).rglob("*.py")),
    ]
)
MAY_IMPORT = {
    "common": {"common"},
    "cli": {"common", "cli"},
    "data": {"common", "data"},
    "model": {"common", "model"},
    "runtime": {"common", "data", "model", "runtime"},
    "trainer": {"common", "data", "model", "runtime", "trainer"},
    "inference": {"common", "data", "model", "runtime", "inference"},
    "tools": {"common", "data", "model", "runtime", "trainer", "inference", "cli", "tools"},
}


@functools.cache
def tree_of(file):
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), filename=str(file))


@functools.cache
def imported(file):
    """Full names of all modules that a file imports, anywhere, or that it names as "module:function"."""
    names = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"\w+(\.\w+)+:\w+", str(node.value)):
            names.add(node.value.replace(":", "."))
    return names


def imports(file, *modules):
    """Whether a file imports one of these modules, or something in it."""
    return any(name == module or name.startswith(module + ".") for name in imported(file) for module in modules)


def package(file):
    return file.parts[0] if len(file.parts) > 1 else file.stem


def files_of(*packages):
    return [file for file in FILES if package(file) in packages]


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_import_only_what_stands_below_them(name):
    others = {*PACKAGES, "train", "eval", "sample", "scripts", "tests"} - MAY_IMPORT[name]
    for file in files_of(name):
        assert [other for other in others if imports(file, other)] == [], file


def test_the_diagram_of_architecture_shows_who_imports_whom():
    """It leaves out what follows from other arrows, and common, which everything may import."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    arrows = set(re.findall(r"^ +([\w.]+) --> ([\w.]+)$", page, re.M))
    boxes = {box for arrow in arrows for box in arrow}

    def box_of(module):
        if module.split(".")[0] in ("train", "eval", "sample", "scripts"):
            return "commands"
        return max((box for box in boxes if f"{module}.".startswith(f"{box}.")), key=len, default=None)

    def leads(start, end, arrows):
        return (start, end) in arrows or any(leads(via, end, arrows) for first, via in arrows if first == start)

    found = set()
    for file in FILES:
        start = box_of(".".join(file.with_suffix("").parts))
        found |= {(start, end) for end in map(box_of, imported(file)) if start and end and start != end}
    assert arrows <= found, "an arrow is drawn that no import is"
    assert [pair for pair in found if not leads(*pair, arrows)] == [], "an import is not drawn"
    assert [pair for pair in arrows if leads(*pair, arrows - {pair})] == [], "an arrow follows from others"


def test_pages_name_files_and_sections_that_exist():
    """The map of docs/architecture.md names a file or a folder for each behaviour; links may name a section."""
    named = re.findall(r"`((?:\w+/)+[\w.]*|\w+\.py)`", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert len(named) > 60
    assert [name for name in named if not (ROOT / name).exists()] == []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for name, section in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            path = page.parent / name if name else page
            assert path.exists(), f"{page}: {name}"
            text = path.read_text(encoding="utf-8") if section else ""
            titles = [title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)", text, re.M)]
            assert section in ["", *(re.sub(r"[^\w-]", "", title) for title in titles)], f"{page}: {name}#{section}"


def test_what_reads_data_does_not_prepare_it():
    for file in files_of("data", "runtime", "trainer", "inference"):
        assert file.is_relative_to("data/prepare") or not imports(file, "data.prepare"), file


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        (["hydra", "omegaconf"], ["cli/compose.py", "cli/sweep.py"]),
        (["torch.distributed", "torch.nn.parallel"], ["runtime/distributed.py", "runtime/launch.py"]),
        (["wandb", "tensorboard", "torch.utils.tensorboard"], ["trainer/records/trackers.py"]),
    ],
    ids=lambda value: value[0],
)
def test_a_package_is_imported_where_it_may_be_and_nowhere_else(modules, allowed):
    assert [str(file) for file in FILES if imports(file, *modules)] == allowed


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutations_fit_the_code(mutation):
    """The text that tests/mutations.py replaces is there once, and what replaces it is Python."""
    ast.parse(mutated(mutation, (ROOT / mutation.file).read_text(encoding="utf-8")))
    assert (ROOT / mutation.tests).is_file()


def test_what_the_house_holds_is_within_its_budget():
    """tests/budget.yaml says the most; raising a figure there is a commit of its own that says why."""
    assert find_excesses() == []


def test_no_line_of_prose_is_above_120_characters():
    """Code is checked by ruff. Rows of tables and links may be longer."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    paths = [*pages, *ROOT.glob("configs/**/*.yaml"), *ROOT.glob("*.toml"), *ROOT.glob("scripts/slurm/*")]
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        long = [line for line in lines if len(line) > 120 and not line.startswith(("|", "[", "module = ["))]
        assert long == [], path
