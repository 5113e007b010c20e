"""Numbers that the tables of From Attention to Activation (arXiv 2410.17174) print, by variant (`models.variants`).

They and their notes are in paper_tables.json. Metrics have our names. `vanilla` is softmax and Adam, `cured` is
softmax-1 and OrthoAdam.
"""

import json
from pathlib import Path
from typing import Any

Table = dict[str, dict[str, float]]  # variant -> metric -> number


def _table(content: dict[str, Any]) -> Table:
    return {name: dict(zip(content["metrics"], row, strict=True)) for name, row in content["rows"].items()}


_PRINTED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_5 = (_table(_PRINTED[f"TABLE_{number}"]) for number in range(1, 6))
TABLE_6, TABLE_7, TABLE_8, TABLE_9 = (_table(_PRINTED[f"TABLE_{number}"]) for number in range(6, 10))
TABLE_9_PUBLIC = _table(_PRINTED["TABLE_9_PUBLIC"])
