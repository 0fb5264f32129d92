"""Data to evaluate on: texts, chunks, questions, prompts."""
