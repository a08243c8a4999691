"""Says whether grammars compile: `python -m engine.grammar_check DIRECTORY VOCABULARY END...`.

A process of its own, because a compilation can be stopped in no other way, may take all memory
there is, and holds whoever loads the vocabulary for up to a second. It gets the directory of the
model, the size of its vocabulary and the ids of its end-of-sequence tokens. Per line of standard
input, a JSON list of kind and text, it answers with one line, a JSON string that says what is
wrong; it is empty where nothing is. The first line, empty too, comes once it is ready. It ends with
its input.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import InvalidRequest
from engine.grammar import TOO_SLOW, Grammars, first_line
from engine.request import GrammarParams

# Processor seconds for the first mask, in which much is made that others use.
MOST_FIRST_S = 0.25
MOST_MEMORY = 4 << 30  # of addresses, most of which are never touched


def main(argv: Sequence[str]) -> int:
    directory, vocab_size, *ends = argv
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    grammars = Grammars(tokenizer, int(vocab_size), [int(end) for end in ends], kept=0)
    _say(what_is_wrong(grammars, "regex", "a"))  # loads the library and the vocabulary
    for line in sys.stdin:
        kind, text = json.loads(line)
        _say(what_is_wrong(grammars, kind, text))
    return 0


def what_is_wrong(grammars: Grammars, kind: str, text: str) -> str:
    """Empty if it compiles and can begin."""
    try:
        matcher = grammars.matcher(GrammarParams(kind, text)).deep_copy()
    except InvalidRequest as error:
        return str(error)
    begun = time.process_time()
    matcher.compute_bitmask()
    if time.process_time() - begun > MOST_FIRST_S:
        return TOO_SLOW
    return first_line(str(matcher.get_error()))


def _say(answer: str) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
