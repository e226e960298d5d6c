"""What a training run will take: python scripts/plan.py experiment=pile_125m device=a100-40gb n_device=8 mfu=0.4."""

from typing import Any

from cli import command


def run(config: dict[str, Any]) -> None:
    """Decode the configuration and plan."""
    from common.settings import decode
    from tools.plan.plan import PlanConfig
    from tools.plan.report import run_plan

    run_plan(decode(PlanConfig, config))


if __name__ == "__main__":
    command("plan", run)
