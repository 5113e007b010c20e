"""From Attention to Activation (arXiv 2410.17174): its tables, figures and appendices."""

from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = ()
