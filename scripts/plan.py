"""Say what a training run will take.

python scripts/plan.py experiment=pile_125m device=a100-40gb n_device=8 mfu=0.4
"""

from cli import command

if __name__ == "__main__":
    command("plan", "tools.plan:print_plan", "tools.plan:PlanConfig", text_keys=("eval.prompt",))
