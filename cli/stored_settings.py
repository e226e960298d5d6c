"""Settings that a run, a model or a dataset has stored: `train.py run_dir=X` continues run X.

The defaults of configs/ come first, then what is stored, then the options.
"""

import os
from collections.abc import Collection
from pathlib import Path

from cli.compose import compose, parse_options, value_at
from common.config_files import group_values, groups_of
from common.files import read_json
from common.settings import JsonDict, UserError, section

_OF_ONE_COMMAND = {"resume", "stop_at"}


def compose_command(
    config_name: str,
    options: list[str],
    config_dir: str | None = None,
    complete: bool = True,
    job: str = "",
) -> JsonDict:
    """Compose a command's configuration from these options.

    For train and plan, the settings of the run in run_dir are used, unless the options give an
    experiment, which is complete, or delete a key (~KEY).

    Args:
        complete: as for `compose`.
        job: the folder of a sweep's job in run_dir. A job does not use a run's settings.

    Raises:
        UserError: an option is wrong, or there is no run to continue.
    """
    if config_name not in ("train", "plan"):
        return compose(config_name, options, config_dir, complete)
    typed = _typed_values(options)
    # Without typed settings of a new run, those of the run in run_dir count.
    stored = {} if job else _run_to_continue(typed, complete)
    config = _composed(config_name, options, config_dir, complete, stored)
    # A run that exists keeps its vocabulary, even if its other settings are composed anew.
    model: JsonDict = {}
    if config_name == "train" or stored:
        model = _stored_run(Path(str(config.get("run_dir")), job)).get("model", {})
    # init_from gives the model of other weights, unless one is typed.
    takes_model = config.get("init_from") is not None and "model" not in typed and not stored
    if takes_model:
        model = model or _model_of(Path(str(config["init_from"])))
        config = _composed(config_name, options, config_dir, complete, {"model": model})
    if {"max_steps", "epochs"} <= typed.keys():
        raise UserError("max_steps and epochs are both given: give one of the two lengths")
    # max_steps replaces the epochs of a file or a run. For a plan, a run has stored its steps.
    plans_stored_run = config_name == "plan" and "epochs" in stored
    if "max_steps" in typed or plans_stored_run:
        config["epochs"] = None
    if job:
        config["run_dir"] = str(Path(config["run_dir"], job))
    if "model.n_vocab" not in typed and isinstance(config.get("model"), dict):
        n_vocab = _vocabulary(config, model, takes_model)
        config["model"] = config["model"] | {"n_vocab": n_vocab}
    return config


def _typed_values(options: list[str]) -> JsonDict:
    """Return the options' values by key, numbers as they were typed: 1e3.

    An option that deletes a key has the key "~".
    """
    values = {}
    for option in parse_options(options):
        key = "~" if option.is_delete() else option.key_or_group
        is_number = isinstance(option.value(), int | float)
        word = str(option.input_line).partition("=")[2]
        values[key] = word if is_number else option.value()
    return values


def _run_to_continue(typed: JsonDict, complete: bool) -> JsonDict:
    """Return the settings of the run in run_dir; {} if the options are those of a new run.

    Raises:
        UserError: there is no run to continue.
    """
    if "run_dir" not in typed or typed.keys() & {"experiment", "~"}:
        return {}
    stored = _stored_run(Path(os.path.expanduser(str(typed["run_dir"]))))
    if complete and not stored and not typed.keys() & {"dataset_dir", "model"}:
        raise UserError(
            f"run_dir={typed['run_dir']} holds no run to continue, or a damaged config.json: "
            "give experiment=..."
        )
    return stored


def _composed(
    config_name: str, options: list[str], config_dir: str | None, complete: bool, stored: JsonDict
) -> JsonDict:
    """Compose with the groups that the stored settings name, and merge those settings in.

    Of the stored settings, Hydra gets only names of files in configs/. All other values are data.
    """
    typed = _typed_values(options).keys()
    # A stored dataset_dir is merged in below, so it need not be among the options.
    chosen = ["dataset_dir=null"] if "dataset_dir" in stored else []
    # The run's choice in every group for which none is typed.
    for group, names in groups_of("train").items():
        name = value_at(stored, *group.split("/"), "name")
        # A typed model=X also chooses the group model/attention.
        is_typed = any(f"{group}/".startswith(f"{key}/") for key in typed)
        if name in names and not is_typed:
            chosen.append(f"{group}={name}")
    trackers = [name for name in groups_of("train")["tracker"] if value_at(stored, "tracker", name)]
    if trackers and "tracker" not in typed:
        chosen.append(f"tracker=[{','.join(trackers)}]")
    # What is typed wins over what is stored.
    composed = compose(config_name, [*chosen, *options], config_dir, complete)
    fixed_keys = {key.replace("/", ".") for key in typed} | _OF_ONE_COMMAND
    return _merged(composed, stored, fixed_keys)


def _merged(
    composed: JsonDict, stored: JsonDict, fixed_keys: Collection[str], prefix: str = ""
) -> JsonDict:
    """Return composed settings with stored values. Those of `fixed_keys`, dotted, do not change."""
    merged = dict(composed)
    for key, value in composed.items():
        dotted = prefix + key
        if dotted in fixed_keys or key not in stored:
            continue
        merged[key] = stored[key]
        if isinstance(value, dict) and isinstance(stored[key], dict):
            merged[key] = _merged(value, stored[key], fixed_keys, f"{dotted}.")
    return merged


def _vocabulary(config: JsonDict, model: JsonDict, of_init_from: bool) -> int | None:
    """Return model.n_vocab: that of the run's model, or else of the dataset.

    If a user's own configuration of a model gives another one than ours, that is kept. With
    init_from it is the larger one of model and dataset, because the dataset's tokenizer may have
    markers that the model's lacks.
    """
    tokenizer = _read(Path(str(config["dataset_dir"]), "manifest.json"), "tokenizer")
    n_dataset = tokenizer.get("n_vocab")
    n_composed: int | None = config["model"].get("n_vocab")
    if of_init_from and model:
        known = [n for n in (n_composed, n_dataset) if isinstance(n, int)]
        return max(known, default=None)
    our_models = groups_of("train")["model"]
    if n_composed in {group_values("model", name).get("n_vocab") for name in our_models}:
        return model.get("n_vocab") or n_dataset or n_composed
    return n_composed


def _model_of(path: Path) -> JsonDict:
    """Return the model's settings in a run's newest checkpoint, or in a checkpoint; {} if none."""
    if path.name in ("latest", "best") and path.is_file():
        path = path.with_name(path.read_text(errors="replace").strip())
    for folder in (path, *sorted(path.glob("checkpoints/step-*"), reverse=True)):
        model = _read(folder / "state.json", "model")
        if model:
            return model
    return {}


def _stored_run(run_dir: Path) -> JsonDict:
    """Return the settings of a run; {} if there is none, or if its file is damaged, of which
    training warns."""
    stored = _read(run_dir / "config.json", "config")
    environment = _read(run_dir / "config.json", "environment")
    moved = stored and not Path(str(stored.get("dataset_dir"))).exists()
    if moved and "dataset_dir" in environment:  # the run was started in another folder
        stored["dataset_dir"] = environment["dataset_dir"]
    return stored


def _read(file: Path, key: str) -> JsonDict:
    """Return a section of a JSON file; {} if it cannot be read, which the command reports."""
    try:
        return section(read_json(file), key)
    except UserError:
        return {}
