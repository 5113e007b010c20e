"""Active-Dormant Attention Heads (arXiv 2410.13835): Bigram-Backcopy, its theory, and what the paper leaves open."""

from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = ()
