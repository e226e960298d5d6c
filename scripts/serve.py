"""Serve a model: python scripts/serve.py checkpoint=runs/demo."""

from importlib.util import find_spec
from typing import Any

from cli import command


def run(config: dict[str, Any]) -> None:
    """Decode the configuration and serve."""
    from common.settings import UserError, decode
    from inference.server.config import ServeConfig

    settings = decode(ServeConfig, config)
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"{missing[0]} is not installed: pip install -e '.[serve]'")
    from inference.server.serve import serve

    serve(settings)


if __name__ == "__main__":
    command("serve", run)
