"""Export to transformers: python scripts/export_hf.py checkpoint=runs/pile out_dir=exports/pile."""

from cli import command

if __name__ == "__main__":
    command(
        "export_hf",
        "tools.convert.export_hf:export_checkpoint",
        when_interrupted="interrupted; nothing was written",
    )
