"""Check hardware and installation: python scripts/doctor.py"""

from cli import command

if __name__ == "__main__":
    command("doctor", "tools.doctor:examine_machine")
