"""Continuous batching over fixed states: requests in, tokens out."""
