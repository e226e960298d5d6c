"""The code that an exported folder brings along: copies of our modules, in the one form that transformers loads.

That is a flat folder in which modules import each other as `from .name import ...`, so that `model.attention.cache`
becomes `model_attention_cache.py`.
"""

import re
from collections.abc import Iterable
from pathlib import Path

CONFIG_CLASS = "configuration_log_gpt.LogGPTConfig"
MODEL_CLASS = "modeling_log_gpt.LogGPTForCausalLM"

_ROOT = Path(__file__).resolve().parents[2]
_HERE = "model.hugging_face."
_STAND_INS = {"common.console": f"{_HERE}console"}
_OURS = re.compile(r"^( *)from ((?:common|model)(?:\.\w+)*) import (\w*)", re.MULTILINE)
_TRITON = re.compile(r"^(import triton.*)$", re.MULTILINE)


def modeling_files() -> dict[str, str]:
    """Name and text of every file that the two classes need."""
    texts: dict[str, str] = {}
    waiting = [_HERE + name.split(".")[0] for name in (CONFIG_CLASS, MODEL_CLASS)]
    while waiting:
        module = waiting.pop()
        name = f"{_flat(module)}.py"
        if name not in texts:
            text = _path(module).read_text(encoding="utf-8")
            waiting += [_module(match) for match in _OURS.finditer(text)]
            texts[name] = _rewritten(text)
    texts[MODEL_CLASS.split(".")[0] + ".py"] += _list_of(texts)
    return texts


def _list_of(files: Iterable[str]) -> str:
    """What makes transformers copy all files, some versions of which look no further than the first file's imports."""
    lines = (f"    from .{name.removesuffix('.py')} import __doc__ as _\n" for name in sorted(files))
    return "\n\nif False:  # never: but transformers copies what is named in this form\n" + "".join(lines)


def _module(match: re.Match[str]) -> str:
    """The module that an import is from, or is of."""
    _, package, name = match.groups()
    inner = f"{package}.{name}"
    return _STAND_INS.get(package, inner if name and _path(inner).exists() else package)


def _rewritten(text: str) -> str:
    # What is imported outside of a `try`, transformers asks for before it downloads a file: but only GPUs need this.
    text = _TRITON.sub(r"try:\n    \1\nexcept ImportError:\n    pass", text)
    return _OURS.sub(_relative, text)


def _relative(match: re.Match[str]) -> str:
    indent, package, name = match.groups()
    module = _module(match)
    if module == f"{package}.{name}":
        return f"{indent}from . import {_flat(module)} as {name}"
    return f"{indent}from .{_flat(module)} import {name}"


def _flat(module: str) -> str:
    return module.removeprefix(_HERE).replace(".", "_")


def _path(module: str) -> Path:
    path = _ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
