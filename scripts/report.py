"""Compare runs: python scripts/report.py folders=runs/sweep."""

from cli import command

if __name__ == "__main__":
    command("report", "tools.report:write_report", text_keys=("folders",))
