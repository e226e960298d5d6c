"""`train.py run_dir=X` continues the run in X: settings that are not given are the run's own."""

from pathlib import Path
from typing import Any

from cli.compose import compose, keys_and_values, to_dict
from common.files import read_json
from common.settings import CONFIGS, UserError

_OF_ONE_COMMAND = {"resume", "stop_at"}
_VARIANTS = ("model/attention", "model/block", "model/position", "optim", "schedule")
_TRACKERS = ("wandb", "tensorboard")


def compose_training(options: list[str], config_dir: str | None, complete: bool = True) -> dict[str, Any]:
    """Compose configs/train.yaml with these options, over the settings of the run in run_dir, if it holds one.

    With an `experiment`, which is complete, or if a key is deleted (~KEY), the run's own settings are not used. Hydra
    gets only names of files in configs/ from config.json; all other values are data. `complete`: as for to_dict.
    """
    given = keys_and_values(options)
    continues = "run_dir" in given and not given.keys() & {"experiment", "~"}
    own = _settings_of(Path(str(given["run_dir"]))) if continues else {}
    if continues and complete and not own and "dataset_dir" not in given:
        why = "a damaged config.json" if Path(str(given["run_dir"]), "config.json").exists() else "no run to continue"
        raise UserError(f"run_dir={given['run_dir']} holds {why}: give experiment=... or dataset_dir=...")
    if not own:
        return to_dict(compose("train", options, config_dir), complete)
    variants = [
        f"{group}={name}"
        for group in _VARIANTS
        if (name := _variant(own, group)) and not any(f"{group}/".startswith(f"{key}/") for key in given)
    ]
    trackers = [name for name in _TRACKERS if isinstance(own.get("tracker"), dict) and own["tracker"].get(name)]
    variants += [f"tracker=[{','.join(trackers)}]"] if trackers and "tracker" not in given else []
    composed = to_dict(compose("train", ["dataset_dir=null", *variants, *options], config_dir), complete)
    return _over(composed, own, {key.replace("/", ".") for key in given} | _OF_ONE_COMMAND)


def _settings_of(run_dir: Path) -> dict[str, Any]:
    try:
        return dict(read_json(run_dir / "config.json")["config"])
    except (UserError, KeyError, TypeError, ValueError):  # no run, or a damaged record, which training warns of
        return {}


def _variant(own: Any, group: str) -> str | None:
    """Return the name of the file in a group that the run's settings are of."""
    for key in (*group.split("/"), "name"):
        own = own.get(key) if isinstance(own, dict) else None
    return own if own in [path.stem for path in (CONFIGS / group).glob("*.yaml")] else None


def _over(composed: dict[str, Any], own: dict[str, Any], given: set[str], prefix: str = "") -> dict[str, Any]:
    """Return what was composed, with the run's own values of all keys that were not given."""
    merged = dict(composed)
    for key, value in composed.items():
        path = f"{prefix}{key}"
        if path in given or key not in own:
            continue
        both = isinstance(value, dict) and isinstance(own[key], dict)
        merged[key] = _over(value, own[key], given, f"{path}.") if both else own[key]
    return merged
