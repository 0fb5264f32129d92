"""Answers to questions on long documents, by policy and size: the paper's SQuALITY and QASPER."""
