"""Engines whose workers are processes of their own: `python spawned.py MODEL SPARSE GIVEN`, the last two JSON.

A script, because vLLM starts its processes from the program's own file. It prints a line of JSON: what the engine
answered, and what `stats` says in this process, which starts them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    from engines import LENGTHS, TOKENS, ask, engine, prompts

    model, sparse, given = sys.argv[1], *map(json.loads, sys.argv[2:])
    with engine(Path(model), sparse, apart=True, **given) as llm:
        answer = ask(llm, prompts(*LENGTHS), TOKENS)
    print(json.dumps({"tokens": answer.tokens, "stats": answer.stats.to_dict(), "pid": os.getpid()}))


if __name__ == "__main__":
    main()
