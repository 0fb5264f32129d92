"""Ratios measured in one run: `python -m benchmarks.NAME`, one script per question."""
