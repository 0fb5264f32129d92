"""The interface to Hugging Face transformers: inspection, cache layers, attention, generation, loading."""
