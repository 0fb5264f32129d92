"""Memory, batch, time and throughput of a decode step: the paper's table of efficiency."""

PROMPT = 16  # tokens that a whole sequence starts from
NATIVE = "16-bit"  # KV rows in the dtype of the model's keys and values
