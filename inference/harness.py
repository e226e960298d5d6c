"""scripts/lm_eval.py: benchmarks of EleutherAI's lm-evaluation-harness."""

import logging
from pathlib import Path
from typing import Any

from pydantic import Field

from common.console import say, show
from common.settings import UserError, nearest
from inference.load import ModelConfig, load


class HarnessConfig(ModelConfig, defaults="lm_eval"):
    """The settings of scripts/lm_eval.py."""

    tasks: str
    """Names of the harness's tasks, groups or tags, separated by commas; * matches any characters."""
    include_path: Path | None
    """A folder of task files of your own. They may contain Python, which is run: use only files that you trust."""
    num_fewshot: int | None = Field(ge=0)
    """Examples before each question; null: each task's own number."""
    limit: int | None = Field(ge=1)
    """Use only this many questions of each task, for a trial; null: all."""
    max_length: int | None = Field(ge=2)
    """Most tokens the model may read: longer contexts lose their beginning, and longer texts are scored in windows, as
    the harness does for other models. null: the model's learned positions, or no limit where it has none."""
    micro_batch: int = Field(ge=1)
    """Texts that go through the model at once."""


def run_harness(config: HarnessConfig) -> None:
    """Run the tasks, print a table of their metrics, and write lm_eval.json in the run directory.

    Raises:
        UserError: there is no such task, or max_length is more than the model has.
    """
    from lm_eval import simple_evaluate  # an optional package, and slow to import
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    from inference.harness_model import HarnessModel

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it announces each of its retries

    if config.include_path is not None and not config.include_path.is_dir():
        raise UserError(
            f"include_path={config.include_path} is not a folder: give the folder of your task files"
        )
    loaded = load(config)
    if loaded.tokenizer.name == "none":
        what = f"checkpoint={config.checkpoint} was trained on ids without text (tokenizer=none)"
        raise UserError(f"{what}, and the harness's tasks are texts: use eval.py")
    max_len, wanted = loaded.gpt.config.max_len, config.max_length
    if max_len is not None and wanted is not None and wanted > max_len:
        raise UserError(
            f"max_length={wanted} is more than the model's {max_len} learned positions: lower it"
        )
    say("reading the names of the harness's tasks ...")
    manager = TaskManager(include_path=config.include_path and str(config.include_path))
    tasks = find_tasks(config.tasks, manager)
    gpt = loaded.place(loaded.runtime.device, autocast=True)
    model = HarnessModel(
        gpt, loaded.tokenizer, wanted or max_len, config.micro_batch, loaded.runtime
    )
    try:
        found = simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            task_manager=manager,
            log_samples=False,
        )
    except ValueError as error:  # for example num_fewshot above a task's examples
        given = f"tasks={config.tasks} num_fewshot={config.num_fewshot}"
        raise UserError(f"{given}: the harness failed ({error}): --debug shows where") from error
    except OSError as error:
        remedy = "check the network, or bring the folder HF_HOME of a machine that has run it"
        raise UserError(
            f"tasks={config.tasks} need data that cannot be fetched ({error}): {remedy}"
        ) from error
    show(make_table(found) + "\n")
    kept = (
        "results",
        "groups",
        "versions",
        "n-shot",
        "n-samples",
        "higher_is_better",
        "lm_eval_version",
    )
    result = {
        **loaded.about(config),
        **config.model_dump(mode="json", include={"tasks", "num_fewshot", "limit", "max_length"}),
        **{key: found[key] for key in kept if key in found},
    }
    loaded.write_result(result, config.model_copy(update={"include_path": None}), "lm_eval")


def find_tasks(names: str, manager: Any) -> list[str]:
    """The names of the tasks that match.

    Raises:
        UserError: a name matches no task.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not manager.match_tasks([name]):
            raise UserError(f"task {name!r} does not exist: {nearest(name, manager.all_tasks)}")
    if not wanted:
        raise UserError(
            "tasks is empty: give names of tasks, such as tasks=lambada_openai,hellaswag"
        )
    return list(manager.match_tasks(wanted))
