"""Perplexity far beyond the training length: one state from a book's first token to its last."""
