"""Exit statuses of train.py besides 0 (done), 1 (an error that a person must fix) and 128 + n (killed by signal n)."""

AGAIN = 75
"""Stopped; only the steps since the last checkpoint are lost. Run the same command again (EX_TEMPFAIL)."""
