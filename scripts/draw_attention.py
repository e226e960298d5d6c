"""Draw attention: python scripts/draw_attention.py out=docs/attention_masks.png."""

from cli import command

if __name__ == "__main__":
    command("draw_attention", "tools.report.attention_masks:draw", text_keys=("text",))
