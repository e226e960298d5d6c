"""What this machine can do and what is wrong with it: scripts/doctor.py."""
