"""Compiled evaluation orders, one file each; every entry point has the signature of its torch reference."""
