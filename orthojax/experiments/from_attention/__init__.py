"""From Attention to Activation (arXiv 2410.17174): its tables, figures and appendices."""

from orthojax.experiments.from_attention import appendices, figures, tables
from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = (
    tables.TABLE1, tables.TABLE2, tables.TABLE3, tables.TABLE4, tables.TABLE5, tables.TABLE6, tables.TABLE7,
    tables.TABLE8, tables.TABLE9,
    figures.FIGURE1, figures.FIGURE2, figures.FIGURE3, figures.FIGURE4, figures.FIGURE6, figures.FIGURE7,
    figures.FIGURE12, figures.FIGURE17, figures.FIGURE22, figures.FIGURE27, figures.FIGURE34, figures.FIGURE41,
    appendices.APPENDIX_E, appendices.APPENDIX_G, appendices.APPENDIX_H,
)  # fmt: skip
