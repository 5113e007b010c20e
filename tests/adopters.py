"""Parameter trees of well-known JAX code bases, from adopters.txt: paths and shapes, as data for tests.

A rule that finds d_model (the width of the residual stream) from names and shapes alone must give the width that stands
beside a name, and must refuse the trees that are in doubt. Names and shapes are facts from the public code of each
project: nanodo, Flax (gemma, nnx.LoRALinear), dm-haiku, Equinox, Simply, jax-llm-examples, Levanter, MaxText, Praxis,
Qwix and Hugging Face Transformers (the Flax models). Paths are what jax.tree_util.keystr(path, simple=True,
separator="/") gives. Sizes are the project's own, or others its configuration allows that keep d_model, d_ff and
heads * head_dim apart; two layers where each layer has its own arrays (three in deepseek_r1).
"""

import itertools
import re
from pathlib import Path


def tree(text):
    """{path: shape} of entries path:64x256; {a,b} stands for several paths; stem/ goes in front of all that follow."""
    shapes, stem = {}, ""
    for entry in text.split():
        if entry.endswith("/"):
            stem = entry
            continue
        path, _, dims = entry.partition(":")
        pieces = re.split("[{}]", stem + path)
        options = [piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces)]
        for choice in itertools.product(*options):
            shapes["".join(choice)] = tuple(int(n) for n in dims.split("x") if n)
    return shapes


DECIDED, REFUSED = {}, {}
for block in (Path(__file__).parent / "adopters.txt").read_text().split("\n\n"):
    head, *lines = [line for line in block.splitlines() if not line.startswith("#")]
    name, _, d_model = head.rpartition(": ")
    if d_model == "in doubt":
        REFUSED[name] = tree(" ".join(lines))
    else:
        DECIDED[name] = int(d_model), tree(" ".join(lines))
