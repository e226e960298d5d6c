"""Who may import whom, and what may be nowhere: walked in the source, so it holds for code that no test runs."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "data", "model", "trainer")
ENTRY_POINTS = ["train.py", "eval.py", "sample.py"]
FILES = sorted(
    path.relative_to(ROOT)
    for path in [
        *(ROOT / name for name in ("cli.py", *ENTRY_POINTS)),
        *(path for folder in (*PACKAGES, "scripts") for path in (ROOT / folder).rglob("*.py")),
    ]
)
MAY_IMPORT = {
    "common": {"common"},
    "data": {"common", "data"},
    "model": {"common", "model"},
    "trainer": {"common", "data", "model", "trainer"},
}


def tree_of(file):
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), filename=str(file))


def imported(file):
    """Full names of all modules that a file imports, at the top or inside functions."""
    names = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports(file, *modules):
    """Whether a file imports one of these modules, or something in it."""
    return any(name == module or name.startswith(module + ".") for name in imported(file) for module in modules)


def package(file):
    return file.parts[0] if len(file.parts) > 1 else file.stem


@pytest.mark.parametrize("file", [f for f in FILES if package(f) in PACKAGES], ids=str)
def test_packages_import_only_what_stands_below_them(file):
    for other in {*PACKAGES, "cli", "train", "eval", "sample", "scripts", "tests"} - MAY_IMPORT[package(file)]:
        assert not imports(file, other), f"{file} imports {other}"


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        (["hydra", "omegaconf"], ["cli.py", *ENTRY_POINTS]),
        (["torch.distributed", "torch.nn.parallel"], ["trainer/distributed.py"]),
        (["wandb"], ["trainer/metrics.py"]),
        (["pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"], []),
    ],
    ids=lambda value: value[0] if value else "nobody",
)
def test_only_one_file_imports(modules, allowed):
    assert [str(file) for file in FILES if imports(file, *modules) and str(file) not in allowed] == []


@pytest.mark.parametrize("file", FILES, ids=str)
def test_nothing_runs_or_unpickles_what_it_reads(file):
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("eval", "exec", "compile", "__import__", "torch.load", "torch.save"), f"{file}: {name}"
            assert name not in ("yaml.load", "yaml.unsafe_load", "hydra.utils.instantiate"), f"{file}: {name}"
            if name.startswith("np.") and name.endswith("load"):
                assert "allow_pickle=True" not in ast.unparse(node), f"{file}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_points_are_thin(name):
    assert len((ROOT / name).read_text().splitlines()) < 60


def test_the_walk_sees_imports():
    """The tests above could pass by seeing nothing."""
    assert imports(Path("trainer/distributed.py"), "torch.distributed")
    assert imports(Path("trainer/metrics.py"), "wandb")
    assert imports(Path("cli.py"), "hydra")
    assert imports(Path("trainer/loop.py"), "data.loader")
    assert len(FILES) > 30
