"""A tiny conversation in the format of LoCoMo, with a question of each category."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ANN_AND_BEN: dict[str, Any] = {
    "sample_id": "ann-ben",
    "conversation": {
        "speaker_a": "Ann",
        "speaker_b": "Ben",
        "session_10_date_time": "9:00 am on 3 March, 2024",
        "session_10": [{"speaker": "Ann", "dia_id": "D10:1", "text": "The boat is blue now."}],
        "session_2_date_time": "1:30 pm on 2 January, 2024",
        "session_2": [
            {"speaker": "Ann", "dia_id": "D2:1", "text": "I bought a boat!"},
            {"speaker": "Ben", "dia_id": "D2:2", "text": "Look.", "img_url": ["x"], "blip_caption": "a photo of a cat"},
        ],
        "session_11_date_time": "9:00 am on 4 March, 2024",
        "session_11": [],
    },
    "qa": [
        {"question": "When did Ann buy it?", "answer": 2024, "evidence": ["D2:1"], "category": 2},
        {"question": "What do they have?", "answer": "a boat, a cat", "evidence": ["D2:1", "D2:2"], "category": 1},
        {"question": "Does Ann like water?", "answer": "Likely yes; she sails", "evidence": [], "category": 3},
        {"question": "What is blue?", "answer": "the boat", "evidence": ["D10:1"], "category": 4},
        {"question": "What did Ben buy?", "evidence": ["D2:1"], "category": 5, "adversarial_answer": "a boat"},
    ],
}
CARA_AND_DAN: dict[str, Any] = {
    "sample_id": "cara-dan",
    "conversation": {
        "session_1_date_time": "noon on 5 May, 2024",
        "session_1": [{"speaker": "Cara", "text": "I sing."}, {"speaker": "Dan", "text": "I dance."}],
    },
    "qa": [
        {"question": "Who sings?", "answer": "Cara", "evidence": ["D1:1"], "category": 4},
        {"question": "Who dances?", "answer": "Dan", "evidence": ["D1:2"], "category": 4},
    ],
}


def write_chats(path: Path, *samples: Any) -> Path:
    path.write_text(json.dumps(list(samples or (ANN_AND_BEN, CARA_AND_DAN))))
    return path
