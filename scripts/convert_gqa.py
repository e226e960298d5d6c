"""Share keys and values among heads.

python scripts/convert_gqa.py checkpoint=runs/demo run_dir=runs/shared n_kv_head=1
"""

from cli import command

if __name__ == "__main__":
    command("convert_gqa", "tools.convert.gqa:convert")
