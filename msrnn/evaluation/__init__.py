"""What a bounded state costs and gains, measured beside the unmodified model."""
