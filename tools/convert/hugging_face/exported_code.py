"""The code in an exported folder: copies of our modules in the form that transformers can load.

This form is a flat folder in which modules import each other as `from .name import ...`:
`model.attention.cache` becomes `model_attention_cache.py`.
"""

import re
from collections.abc import Iterable
from pathlib import Path

CONFIG_CLASS = "configuration_log_gpt.LogGPTConfig"
MODEL_CLASS = "modeling_log_gpt.LogGPTForCausalLM"

_ROOT = Path(__file__).resolve().parents[3]
_HERE = "tools.convert.hugging_face."
_STAND_INS = {"common.console": f"{_HERE}log_console"}
_OURS = re.compile(r"^( *)from ((?:common|model|tools)(?:\.\w+)*) import (\w*)", re.MULTILINE)
_TRITON = re.compile(r"^((?:import|from) triton.*)$", re.MULTILINE)


def collect_sources(mechanisms: Iterable[type]) -> dict[str, str]:
    """Return the name and text of every file that the two classes need.

    Args:
        mechanisms: the configuration classes of the model's attention.
    """
    texts: dict[str, str] = {}
    waiting = [_HERE + name.split(".")[0] for name in (CONFIG_CLASS, MODEL_CLASS)]
    while waiting:
        module = waiting.pop()
        name = f"{_flat(module)}.py"
        if name not in texts:
            text = _path(module).read_text(encoding="utf-8")
            if module == "model.attention":
                text = _attention(mechanisms)
            waiting += [_module(match) for match in _OURS.finditer(text)]
            texts[name] = _rewritten(text)
    # transformers copies the files that the first one imports, and knows a class of one folder from
    # that of another by them.
    copied = _list_of(texts)
    for name in (CONFIG_CLASS, MODEL_CLASS):
        texts[name.split(".")[0] + ".py"] += copied
    return texts


def _attention(mechanisms: Iterable[type]) -> str:
    """Return model/attention/__init__.py with these mechanisms only."""
    classes = {kind.__name__: kind.__module__ for kind in mechanisms}
    imports = [f"from {module} import {name}" for name, module in classes.items()]
    names = f"AttentionConfig = {' | '.join(classes)}", f"ATTENTION = ({', '.join(classes)},)"
    return "\n".join(['"""The model\'s attention."""\n', *imports, "", *names, ""])


def _list_of(files: Iterable[str]) -> str:
    """Return code that names every file in an import, and does not run."""
    lines = (
        f"    from .{name.removesuffix('.py')} import __doc__ as _\n" for name in sorted(files)
    )
    return "\n\nif False:  # transformers copies the files named here\n" + "".join(lines)


def _module(match: re.Match[str]) -> str:
    """Return the module that an import statement needs."""
    _, package, name = match.groups()
    inner = f"{package}.{name}"
    return _STAND_INS.get(package, inner if name and _path(inner).exists() else package)


def _rewritten(text: str) -> str:
    # Transformers requires every package imported outside of `try` before it loads the code, but
    # only GPUs need triton.
    text = _TRITON.sub(r"try:\n    \1\nexcept ImportError:\n    pass", text)
    # Nor does transformers come with orjson.
    text = text.replace("import orjson\n", "import json as orjson\n")
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
