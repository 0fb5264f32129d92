"""One engine over several processes that share a model."""
