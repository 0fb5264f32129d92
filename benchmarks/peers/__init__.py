"""Other libraries to compare with, each in its own virtual environment."""
