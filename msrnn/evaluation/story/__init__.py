"""Long stories, by policy and size: the same seed tells the same story until something has been forgotten."""
