"""From Attention to Activation (arXiv 2410.17174): its tables, figures and appendices."""

from orthojax.experiments.from_attention.ablation import TABLE5
from orthojax.experiments.from_attention.tables import TABLE1, TABLE2, TABLE3, TABLE4, TABLE6, TABLE7, TABLE8, TABLE9
from orthojax.experiments.study import Study

TABLES: tuple[Study, ...] = (TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8, TABLE9)

STUDIES: tuple[Study, ...] = ()
STUDIES += TABLES
