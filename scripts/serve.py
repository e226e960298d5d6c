"""Serve a model: python scripts/serve.py checkpoint=runs/demo."""

from importlib.util import find_spec
from typing import Any

from cli import command
from common.settings import UserError


def run(settings: Any) -> None:
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"{missing[0]} is not installed: pip install -e '.[serve]'")
    from inference.server.serve import serve

    serve(settings)


if __name__ == "__main__":
    command("serve", "inference.server.config:ServeConfig", run)
