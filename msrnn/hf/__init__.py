"""The seam with Hugging Face transformers."""
