"""Evaluations as functions: one file for each. `msrnn.evaluation` exports them, and the command line calls them."""
