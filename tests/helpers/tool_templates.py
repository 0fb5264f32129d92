"""Chat templates that know tools, in the formats of three families of models, and a tokenizer with their markers."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from tests.helpers.byte_tokenizer import byte_tokenizer

HERMES = """\
{%- if tools or messages[0]['role'] == 'system' %}<system>
{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}
{%- if tools %} Write <tool_call>{"name": ..., "arguments": ...}</tool_call> for:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}{% endif %}<end>
{% endif %}
{%- for m in messages %}
{%- if m['role'] == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}<user>{% endif %}
{{- '\\n<tool_response>\\n' + m['content'] + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<end>
{% endif %}
{%- elif m['role'] == 'assistant' %}<model>
{%- if m['content'] %}{{ m['content'] }}{% if m.tool_calls %}{{ '\\n' }}{% endif %}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}<end>
{% elif m['role'] == 'user' %}<user>{{ m['content'] }}<end>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<model>{% endif %}"""

LLAMA = """\
<s>{% if messages[0]['role'] == 'system' %}<system>{{ messages[0]['content'] | trim }}<end>{% endif %}
{%- set asked = namespace(first=true) %}
{%- for m in messages %}
{%- if m['role'] == 'user' %}<user>
{%- if asked.first and tools %}Answer with {"name": ..., "parameters": ...} of one of these:
{%- for tool in tools %} {{ tool | tojson(indent=2) }}{% endfor %}
{% endif %}
{%- set asked.first = false %}{{ m['content'] | trim }}<end>
{%- elif m['role'] == 'tool' %}<system>{{ m['content'] | tojson }}<end>
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}<model>
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<end>' }}
{%- elif m['role'] == 'assistant' %}<model>{{ m['content'] | trim }}<end>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<model>{% endif %}"""

MISTRAL = """\
<s>{% set last = namespace(user=-1) %}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m['role'] == 'user' %}
{%- if tools and loop.index0 == last.user %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '<user> ' + m['content'] + '<model>' }}
{%- elif m['role'] == 'assistant' and m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have 9 letters and digits') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
{%- endfor %}]<end>
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '<end>' }}
{%- elif m['role'] == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m['content'] | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}
_MARKERS = {
    "hermes": (["<tool_call>", "</tool_call>"], []),
    "llama3_json": ([], ["<|python_tag|>"]),
    "mistral": ([], ["[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
}


def tool_tokenizer(form: str, markers: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes for `byte_model`; `markers`: those of the format are tokens, special or not as in models."""
    tokenizer = byte_tokenizer()
    plain, special = _MARKERS[form] if markers else ([], [])
    tokenizer.add_tokens(plain)
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.chat_template = TEMPLATES[form]
    return tokenizer
