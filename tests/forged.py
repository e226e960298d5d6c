"""Changes of JSON files and checkpoints, as an attacker would make them."""

import json

from common.files import sha256_file


def edit(path, change):
    """Change a JSON file."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def sign(path):
    """Update the sums in a checkpoint's manifest to match its files."""

    def update(manifest):
        manifest["sha256"] = {name: sha256_file(path / name) for name in manifest["sha256"]}

    edit(path / "manifest.json", update)
