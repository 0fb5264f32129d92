"""Peers, each in an environment of its own."""
