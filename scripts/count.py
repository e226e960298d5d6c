"""Count the code: python scripts/count.py"""

from cli import command

if __name__ == "__main__":
    command("count", "tools.count:print_counts")
