"""Checks hardware and installation: scripts/doctor.py."""
