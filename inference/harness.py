"""scripts/lm_eval.py: benchmarks of EleutherAI's lm-evaluation-harness."""

import logging
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.table import Table

from common.console import say, show_table, table_of
from common.settings import JsonDict, UserError, suggest_name
from data.tokenizers.chat import ChatTokenizer
from inference.load import Loaded, ModelConfig, load

# What lm_eval.json keeps of the harness's results.
_KEPT = (
    "results",
    "groups",
    "versions",
    "n-shot",
    "n-samples",
    "higher_is_better",
    "lm_eval_version",
)


class HarnessConfig(ModelConfig, defaults="lm_eval"):
    """The settings of scripts/lm_eval.py."""

    parameters_for_threads = 20_000_000  # its steps have many tokens
    tasks: str
    """Names of the harness's tasks, groups or tags, separated by commas; * is a wildcard."""
    include_path: Path | None
    """A folder of task files of your own.

    They may contain Python, which is run: use only files that you trust.
    """
    num_fewshot: int | None = Field(ge=0)
    """Examples before each question; null: each task's own number."""
    limit: int | None = Field(ge=1)
    """Use only this many questions of each task, for a trial; null: all."""
    max_length: int | None = Field(ge=2)
    """Most tokens the model may read; null: its learned positions, or no limit without these.

    Longer contexts lose their beginning, and longer texts are scored in windows, as the harness
    does for other models.
    """
    apply_chat_template: bool
    """Put the tasks' questions to a chat model as a user does; false: as texts to continue."""
    micro_batch: int = Field(ge=1)
    """Texts that go through the model at once."""


def run_harness(config: HarnessConfig) -> None:
    """Run the tasks, print a table of their metrics, and write lm_eval.json in the run directory.

    Raises:
        UserError: there is no such task, or max_length is more than the model has.
    """
    from lm_eval import simple_evaluate  # an optional package, and slow to import
    from lm_eval.tasks import TaskManager

    from inference.harness_model import HarnessModel

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it announces each of its retries
    # Check all settings before tasks are downloaded.
    loaded = load(config)
    max_length = _choose_max_length(config, loaded)
    say("reading the names of the harness's tasks ...")
    task_folder = None if config.include_path is None else str(config.include_path)
    manager = TaskManager(include_path=task_folder)
    tasks = find_tasks(config.tasks, manager)
    # Run the tasks. The harness's errors name what it was doing.
    gpt = loaded.place(loaded.compute.device, autocast=True)
    model = HarnessModel(gpt, loaded.tokenizer, max_length, config.micro_batch, loaded.compute)
    try:
        results = simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            apply_chat_template=config.apply_chat_template,
            task_manager=manager,
            log_samples=False,
        )
    except ValueError as error:  # for example num_fewshot above a task's examples
        raise UserError(
            f"tasks={config.tasks} num_fewshot={config.num_fewshot}: the harness failed ({error}): "
            "--debug shows where"
        ) from error
    except OSError as error:
        raise UserError(
            f"tasks={config.tasks} need data that cannot be fetched ({error}): check the network, "
            "or bring the folder HF_HOME of a machine that has run it"
        ) from error
    # Show the metrics, and store them with the settings that they depend on.
    show_table(_tabulate(results))
    settings = {"tasks", "num_fewshot", "limit", "max_length", "apply_chat_template"}
    result = {
        **loaded.describe(),
        **config.model_dump(mode="json", include=settings),
        **{key: results[key] for key in _KEPT if key in results},
    }
    loaded.write_result(result, config.model_copy(update={"include_path": None}), "lm_eval")


def _choose_max_length(config: HarnessConfig, loaded: Loaded) -> int | None:
    """Return the most tokens that the model may read; None: any number.

    Raises:
        UserError: the settings do not suit the model.
    """
    if config.apply_chat_template and not isinstance(loaded.tokenizer, ChatTokenizer):
        raise UserError(
            f"apply_chat_template=true needs a chat model, and checkpoint={config.checkpoint} was "
            "not trained on conversations: leave it out"
        )
    max_len = loaded.gpt.config.max_len
    if max_len is not None and (config.max_length or 0) > max_len:
        raise UserError(
            f"max_length={config.max_length} is more than the model's {max_len} learned positions: "
            "lower it"
        )
    return config.max_length or max_len


def _tabulate(results: JsonDict) -> Table:
    """Return a table with a row for each metric of each task and filter of its answers."""
    table = table_of(["task", "filter", "metric"], ["shots", "examples", "value", "standard error"])
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            numbers = [value, values.get(f"{metric}_stderr,{kind}", "")]
            cells = [f"{x:.4f}" if isinstance(x, float) else str(x) for x in numbers]
            n_shots = str(results["n-shot"].get(task, ""))
            n_examples = str(results["n-samples"].get(task, {}).get("effective", ""))
            table.add_row(task, kind, metric, n_shots, n_examples, *cells)
    return table


def find_tasks(names: str, manager: Any) -> list[str]:
    """Return the names of the tasks that match.

    Raises:
        UserError: a name matches no task.
    """
    patterns = [name.strip() for name in names.split(",") if name.strip()]
    for pattern in patterns:
        if not manager.match_tasks([pattern]):
            suggestion = suggest_name(pattern, manager.all_tasks)
            raise UserError(f"task {pattern!r} does not exist: {suggestion}")
    return list(manager.match_tasks(patterns))
