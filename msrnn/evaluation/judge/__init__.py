"""Which of two versions of a story is better, by a judge that sees each pair in both orders."""
