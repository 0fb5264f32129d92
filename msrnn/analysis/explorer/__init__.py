"""The explorer: a web page that shows which tokens of a text are kept, in one file without a server."""
