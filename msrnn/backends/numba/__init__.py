"""CPU loops compiled by numba."""
