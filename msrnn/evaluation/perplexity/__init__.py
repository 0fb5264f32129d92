"""The perplexity of a model on chunks of text, for policies and sizes: the paper's table of language modelling."""
