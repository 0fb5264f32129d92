"""What models are asked, word for word as in the paper; braces are filled in."""

from __future__ import annotations

SQUALITY = """{document}

Answer the question in a paragraph.

Question:

{question}

Answer:"""

QASPER = """{document}

Answer the question as concisely as you can, using a single phrase or sentence if possible. If the question cannot be \
answered based on the information in the article, write "unanswerable". If the question is a yes/no question, answer \
"yes", "no", or "unanswerable".

Question:

{question}

Answer:"""

STORY = """### Instruction:
Write a very long story (at least 4,000 words). The story should include at least 20 named characters, spans 3 \
countries and 9 cities, at least 10 chapters and should have a lot of plot twists.

### Response:"""

JUDGE = """Help me decide which response is better given the prompt:
{prompt}
Which of the following responses is better (the responses are separated by '------------------------'):
Response (A):
{first}
------------------------
Response (B):
{second}
Comparing these two responses, which response is better (A), (B) or (C) for equal quality? please select one and only \
one option, be as concisely as you can, using a single phrase."""


def filled(template: str, **parts: str) -> str:
    """The template with each {name} replaced, once; what is filled in may have braces of its own."""
    pieces, rest = [], template
    for name in sorted(parts, key=lambda name: template.index(f"{{{name}}}")):
        before, _, rest = rest.partition(f"{{{name}}}")
        pieces += [before, parts[name]]
    return "".join([*pieces, rest])
