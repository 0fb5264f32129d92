"""One text under one or two policies as a page: a single file that needs no server and no network."""
