"""From Attention to Activation (arXiv 2410.17174): its tables, figures and appendices."""

from orthojax.experiments.from_attention.ablation import TABLE5
from orthojax.experiments.from_attention.appendices import APPENDIX_E, APPENDIX_G, APPENDIX_H
from orthojax.experiments.from_attention.figures import (
    FIGURE1,
    FIGURE2,
    FIGURE3,
    FIGURE4,
    FIGURE6,
    FIGURE27,
    FIGURE34,
    FIGURE41,
)
from orthojax.experiments.from_attention.layers import FIGURE7, FIGURE12, FIGURE17, FIGURE22
from orthojax.experiments.from_attention.tables import TABLE1, TABLE2, TABLE3, TABLE4, TABLE6, TABLE7, TABLE8, TABLE9
from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = (
    TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8, TABLE9,
    FIGURE1, FIGURE2, FIGURE3, FIGURE4, FIGURE6, FIGURE7, FIGURE12, FIGURE17, FIGURE22, FIGURE27, FIGURE34, FIGURE41,
    APPENDIX_E, APPENDIX_G, APPENDIX_H,
)  # fmt: skip
