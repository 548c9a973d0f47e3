"""Texts for published models: English to score, and lines of many languages to tokenize.

english.txt.gz is what this project's documents said in November 2026; the sentences of
languages.txt are the first article of the Universal Declaration of Human Rights, code and signs.
"""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from rooflax.loading.tokenizer import Tokenizer

HERE = Path(__file__).parent
NUM_WINDOWS, WINDOW = 40, 512
NUM_LINES = 3000
BETWEEN = (
    "",
    " ",
    "  ",
    "   ",
    "\t",
    ", ",
    ": ",
    "\n",
    "\r\n",
    "\n\n",
    " \n  ",
    "\u00a0",
    "\u3000",
)


def windows(tokenizer: Tokenizer) -> list[list[int]]:
    """[NUM_WINDOWS, WINDOW] ids of the English text; each begins with BOS if the model has one."""
    text = gzip.decompress((HERE / "english.txt.gz").read_bytes()).decode()
    ids = tokenizer.encode(text, add_special_tokens=False)
    begin = tokenizer.encode("")
    step = WINDOW - len(begin)
    assert len(ids) >= NUM_WINDOWS * step
    return [begin + ids[i * step : (i + 1) * step] for i in range(NUM_WINDOWS)]


def lines() -> list[str]:
    """Sentences and pieces of some, with various whitespace between them; always the same."""
    sentences = (HERE / "languages.txt").read_text(encoding="utf-8").splitlines()
    draw = random.Random(7)
    found = list(sentences)
    while len(found) < NUM_LINES:
        line = ""
        for _ in range(draw.randrange(1, 5)):
            sentence = sentences[draw.randrange(len(sentences))]
            first = draw.randrange(len(sentence))
            line += sentence[first : first + draw.randrange(1, 60)]
            line += BETWEEN[draw.randrange(len(BETWEEN))]
        found.append(line)
    return found
