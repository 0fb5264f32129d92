"""One file per evaluation: what its cells are, how one is computed, how its tables and figure look."""
