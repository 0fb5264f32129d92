"""One layer's data: slots, states, quantization, RoPE. Knows no model and no backend."""
