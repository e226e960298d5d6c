"""Compare runs: python scripts/report.py folders=runs/sweep."""

from cli import command

if __name__ == "__main__":
    message = "no longer following the runs"
    command(
        "report",
        "tools.report.write:write_report",
        text_keys=("folders",),
        when_interrupted=message,
    )
