"""Serve a model: python scripts/serve.py checkpoint=runs/demo."""

from cli import command

if __name__ == "__main__":
    command("serve", "inference.server.serve:serve_model", "inference.server.protocol:ServeConfig")
