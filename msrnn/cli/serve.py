from __future__ import annotations

import os

from msrnn.cli.serve_options import KEY_VARIABLE, ServeOptions
from msrnn.server import start


def serve(*, options: ServeOptions) -> None:
    """Serve a model over HTTP, with the API of OpenAI. Every conversation has the same size, so memory cannot run out.

    The page at / is a chat in the browser that shows what the model still remembers. /v1/chat/completions,
    /v1/completions and /v1/models are those that OpenAI's clients use; /v1/sessions, /tokenize, /detokenize, /health,
    /metrics and /version come with them. With "session_id" in a request, its messages are only what is new, and the
    server remembers the conversation. Each request is one line on standard error,
    without texts and keys. To ask it from a shell:
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}'

    Examples:
        msrnn serve
        msrnn serve --model my-model --size 1024 --slots 64
        msrnn serve --sessions sessions/ --session-days 30 --prefix-states prefixes/
        msrnn serve --host 0.0.0.0 --port 80 --api-key secret
        msrnn serve --model my-model --guesses 8 --draft my-smaller-model
        msrnn serve --replicas 4 --ray --sessions sessions/
        torchrun --no-python --nproc-per-node 8 msrnn serve --model a-large-model
    """
    keys = options.api_key or [key for key in [os.environ.get(KEY_VARIABLE, "")] if key]
    start.serve(**{**vars(options), "api_key": keys})
