"""What a bounded state costs and gains, measured beside the unmodified model in the same run."""

PROMPT = 16  # tokens that a whole sequence starts from
NATIVE, STATE_DTYPES = "16-bit", ("16-bit", "int8", "fp8")  # native: as the model has its keys and values
