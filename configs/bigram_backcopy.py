"""One layer on Bigram-Backcopy: the sink on <s> and its value drain, within seconds.

Reproduces: the softmax column of the main job's Backcopy table; Active-Dormant Attention Heads, four times narrower.
Command:    orthojax train --config=configs/bigram_backcopy.py
            orthojax evaluate --checkpoint=runs/bigram_backcopy
            --config.model.normalizer=softmax1 or relu for the other columns
            --config.data.rule=in_context_bigram, bigram_backward, skip_bigram or markov for the related tasks;
            data.bos_tokens=0 or 2, data.delimiter=true; data.counts=FILE.json or data.paths=FILE for other
            bigrams, with model.vocab_size to match
Expected:   see results/README.md; attention on <s> at non-triggers 0.85 (0.66 to 0.94, five seeds) after 400 steps.
Hardware:   two CPU cores, about 15 s.
"""

from orthojax.config import Config
from orthojax.experiments.base_configs import BACKCOPY_MODEL


def get_config() -> Config:
    return BACKCOPY_MODEL
