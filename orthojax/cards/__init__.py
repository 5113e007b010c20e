"""The card of a model: `card` measures a loaded model as `orthojax analyze` does, in Python.

`text` makes rows of a model's tokens, `measures` measures in stages that can be kept, `rounding` says what rounding
costs and what helps, `findings` say it in three sentences, `page` shows cards and measured models as tables and
pictures, which needs the extra `reports`.
"""

from orthojax.cards.findings import Finding as Finding
from orthojax.cards.findings import findings as findings
from orthojax.cards.measures import Measured as Measured
from orthojax.cards.measures import Stages as Stages
from orthojax.cards.measures import measure as measure
from orthojax.cards.measures import measure_model as measure_model
from orthojax.cards.measures import plan as plan
from orthojax.cards.model_card import SCHEMA as SCHEMA
from orthojax.cards.model_card import card as card
from orthojax.cards.model_card import make_card as make_card
from orthojax.cards.model_card import read_cards as read_cards
from orthojax.cards.text import read_rows as read_rows
from orthojax.cards.text import read_token_ids as read_token_ids
