"""GPT-2 130M by SGD, for 8 times the steps of the other ablations: no outliers, but slow.

Reproduces: From Attention to Activation (arXiv 2410.17174):
            rows of SGD in Table 5.
Data:       a quarter of C4 (docs/data.md); FILE is GPT-2's tokenizer.json; the same again with --split=validation
    orthojax prepare --tfds_dir=DIR --dataset=c4/en '--split=train[:25%]' --tokenizer=FILE --output=data/c4_gpt2
Command:    orthojax train --config=configs/paper/ablation_130m_sgd.py --workdir=runs/NAME FLAGS
            orthojax evaluate --checkpoint=runs/NAME
Hardware:   as many devices as there are; hours are those of one NVIDIA H200 at 35% of its peak, by the FLOPs of the
            model. The paper had eight V100 of 32 GB.
Expected:   for the FLAGS of each run, what the paper prints ("-": not printed), and hours:
            perplexity | kurtosis | max |x| | share of queries whose largest weight is key 0.

    (no flags)
      25.3 | 5.0 | 17.8 | 0.019 | 25.4 h
    --config.optim.momentum=0
      33.4 | 3.2 | 13.1 | 0.017 | 25.4 h
"""

from orthojax.config import Config
from orthojax.experiments.from_attention.paper_configs import ablation_sgd_run


def get_config() -> Config:
    return ablation_sgd_run()
