"""Benchmarks, comparisons, plans, reports and conversions: each imports what it measures, and
nothing imports them."""
