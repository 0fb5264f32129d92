"""Other tools that can use a bounded model."""
