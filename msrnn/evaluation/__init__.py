"""Evaluations: what a bounded state costs and gains, compared with the full model."""
