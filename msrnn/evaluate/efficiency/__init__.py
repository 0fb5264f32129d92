"""Memory, batch, time and throughput of a decode step: the paper's table of efficiency."""

PROMPT = 16  # tokens that a whole sequence starts from
NATIVE, STATE_DTYPES = "16-bit", ("16-bit", "int8", "fp8")  # native: as the model has its keys and values
