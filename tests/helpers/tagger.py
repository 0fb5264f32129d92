"""A tagger trained in the test, in the layout in which NLTK keeps its own."""

from __future__ import annotations

import json
from pathlib import Path

SENTENCES = [
    [("Tom", "NNP"), ("'s", "POS"), ("dog", "NN"), ("barks", "VBZ"), (".", ".")],
    [("The", "DT"), ("dog", "NN"), ("barks", "VBZ"), ("loud", "RB"), (".", ".")],
    [("``", "``"), ("Go", "VB"), ("!", "."), ("''", "''"), ("the", "DT"), ("dog", "NN"), ("barks", "VBZ"), (".", ".")],
]


def trained(folder: Path) -> Path:
    from nltk.tag.perceptron import PerceptronTagger

    tagger = PerceptronTagger(load=False)
    tagger.train(SENTENCES, nr_iter=8)
    home = folder / "taggers" / "averaged_perceptron_tagger_eng"
    home.mkdir(parents=True)
    parts = {"weights": tagger.model.weights, "tagdict": tagger.tagdict, "classes": sorted(tagger.classes)}
    for name, part in parts.items():
        (home / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(part))
    return folder
