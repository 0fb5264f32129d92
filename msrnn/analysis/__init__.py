"""Which tokens stay: traces, what they say as tables and figures, and a page to explore them."""
