"""Settings that need not be given, as a run or a dataset has them: `train.py run_dir=X` continues the run in X."""

import os
from pathlib import Path

from cli.compose import compose, keys_and_values, to_dict
from cli.options import groups_of, value_at
from common.files import read_json
from common.settings import JsonDict, UserError, values_of

_OF_ONE_COMMAND = {"resume", "stop_at"}


def compose_training(
    options: list[str], config_dir: str | None, complete: bool, config_name: str
) -> JsonDict:
    """Compose train.yaml or plan.yaml with these options, over the settings of the run in run_dir, if it holds one.

    With an `experiment`, which is complete, or if a key is deleted (~KEY), the run's own settings are not used. Hydra
    gets only names of files in configs/ from config.json; all other values are data. `complete`: as for to_dict.
    """
    given = keys_and_values(options)
    continues = "run_dir" in given and not given.keys() & {"experiment", "~"}
    run_dir = Path(os.path.expanduser(str(given.get("run_dir"))))
    own = _settings_of(run_dir) if continues else {}
    is_damaged, trains = (run_dir / "config.json").exists(), config_name == "train"
    enough = {"dataset_dir"} if trains else {"dataset_dir", "model"}
    if (
        continues
        and complete
        and not own
        and (not given.keys() & enough or (is_damaged and not trains))
    ):
        why = "a damaged config.json" if is_damaged else "no run to continue"
        more = " or dataset_dir=..." if trains else ""
        raise UserError(f"run_dir={given['run_dir']} holds {why}: give experiment=...{more}")
    if not own:
        composed = to_dict(compose(config_name, options, config_dir), complete)
        return with_known(composed, options, continues=trains)
    variants = [
        f"{group}={name}"
        for group, names in groups_of("train").items()
        if (name := value_at(own, *group.split("/"), "name")) in names
        and not any(f"{group}/".startswith(f"{key}/") for key in given)
    ]
    trackers = [name for name in groups_of("train")["tracker"] if value_at(own, "tracker", name)]
    variants += [f"tracker=[{','.join(trackers)}]"] if trackers and "tracker" not in given else []
    composed = to_dict(
        compose(config_name, ["dataset_dir=null", *variants, *options], config_dir), complete
    )
    return with_known(
        _over(composed, own, {key.replace("/", ".") for key in given} | _OF_ONE_COMMAND), options
    )


def with_known(composed: JsonDict, options: list[str], continues: bool = True) -> JsonDict:
    """Return a composed run with the model of init_from, or the n_vocab of its dataset, unless options give them.

    `continues`: the run in run_dir, if it holds one, is continued: its own settings come first.
    """
    given = [key.replace("/", ".") for key in keys_and_values(options)]
    model = composed["model"]
    own_model = (
        _read(Path(str(composed["run_dir"]), "config.json"), "config", "model") if continues else {}
    )
    dataset = _read(Path(str(composed["dataset_dir"]), "manifest.json"), "tokenizer")
    usual = {values_of("model", name).get("n_vocab") for name in groups_of("train")["model"]}
    takes_model = composed["init_from"] is not None and "model" not in given
    if takes_model and (found := own_model or _model_of(Path(str(composed["init_from"])))):
        model = _with_given(
            found, model, [key.removeprefix("model.") for key in given if key.startswith("model.")]
        )
        if (
            "model.n_vocab" not in given
        ):  # the dataset's tokenizer may have markers that the model's lacks
            known_ids = [
                each
                for each in (model.get("n_vocab"), dataset.get("n_vocab"))
                if isinstance(each, int)
            ]
            model = model | {"n_vocab": max(known_ids, default=None)}
    elif (
        isinstance(model, dict) and "model.n_vocab" not in given and model.get("n_vocab") in usual
    ):  # else the user's
        known = own_model or dataset or model
        model = model | {"n_vocab": known.get("n_vocab", model["n_vocab"])}
    return composed | {"model": model}


def _with_given(known: JsonDict, composed: JsonDict, given: list[str]) -> JsonDict:
    """Return known settings with what was composed at the given keys: ["n_layer", "attention.conv"]."""
    for key in given:
        first, _, rest = key.partition(".")
        before, new = known.get(first), composed[first]
        if rest and isinstance(before, dict):
            new = _with_given(before, new, [rest])
        known = known | {first: new}
    return known


def _model_of(path: Path) -> JsonDict:
    """Return the settings of the model of a run's newest checkpoint, or of a checkpoint; {} if there is none."""
    if path.name in ("latest", "best") and path.is_file():
        path = path.with_name(path.read_text(errors="replace").strip())
    for folder in (path, *sorted(path.glob("checkpoints/step-*"), reverse=True)):
        if model := _read(folder / "state.json", "model"):
            return model
    return {}


def _read(file: Path, *keys: str) -> JsonDict:
    """Return a section of a JSON file; {} if it cannot be read, of which the command itself speaks."""
    try:
        section = value_at(read_json(file), *keys)
    except UserError:
        return {}
    return section if isinstance(section, dict) else {}


def _settings_of(run_dir: Path) -> JsonDict:
    own = _read(run_dir / "config.json", "config")
    known = _read(run_dir / "config.json", "environment")
    if (
        own and "dataset_dir" in known and not Path(str(own.get("dataset_dir"))).exists()
    ):  # started in another folder
        own["dataset_dir"] = known["dataset_dir"]
    return own  # {} of no run, or of a damaged record, of which training warns


def _over(composed: JsonDict, own: JsonDict, given: set[str], prefix: str = "") -> JsonDict:
    """Return what was composed, with the run's own values of all keys that were not given."""
    merged = dict(composed)
    for key, value in composed.items():
        path = f"{prefix}{key}"
        if path in given or key not in own:
            continue
        both = isinstance(value, dict) and isinstance(own[key], dict)
        merged[key] = _over(value, own[key], given, f"{path}.") if both else own[key]
    return merged
