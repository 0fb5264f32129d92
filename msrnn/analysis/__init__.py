"""Which tokens are kept: eviction times, their measures as tables and figures, and a page to explore them."""
