"""Exit statuses of train.py beside 0 (done), 1 (an error that a person must mend) and 128 + n (killed by signal n)."""

AGAIN = 75
"""Stopped with nothing lost but the steps since the last checkpoint: start the same command again (EX_TEMPFAIL)."""
