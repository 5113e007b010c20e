"""GPT-2 350M on 126 billion tokens of C4: softmax or softmax-1, Adam or OrthoAdam.

Reproduces: From Attention to Activation (arXiv 2410.17174):
            rows GPT2 350M of Tables 2 and 3.
Data:       a quarter of C4 (docs/data.md); FILE is GPT-2's tokenizer.json; the same again with --split=validation
    orthojax prepare --tfds_dir=DIR --dataset=c4/en '--split=train[:25%]' --tokenizer=FILE --output=data/c4_gpt2
Command:    orthojax train --config=configs/paper/gpt2_350m.py --workdir=runs/NAME FLAGS
            orthojax evaluate --checkpoint=runs/NAME
Hardware:   as many devices as there are; hours are those of one NVIDIA H200 at 35% of its peak, by the FLOPs of the
            model. The paper had eight V100 of 32 GB.
Expected:   for the FLAGS of each run, what the paper prints ("-": not printed), and hours:
            perplexity | kurtosis of position 0 and of the rest | max |x| of both | share of queries whose
            largest weight is key 0 | perplexity in int8 coarse, moderate, fine | in int4.

    (no flags)
      16.37 | 820.3 161.8 | 40196.0 3801.1 | 0.579 | 52.49 19.92 16.5 | 118507.1 | 218 h
    --config.model.normalizer=softmax1
      - | - - | - - | - | - - - | - | 218 h
    --config.optim.optimizer=orthoadam
      - | - - | - - | - | - - - | - | 218 h
    --config.model.normalizer=softmax1 --config.optim.optimizer=orthoadam
      16.31 | 3.1 3.1 | 388.1 333.3 | 0.021 | 16.5 16.46 16.33 | 17.1 | 218 h
"""

from orthojax.config import Config
from orthojax.experiments.from_attention.paper_configs import gpt2_run


def get_config() -> Config:
    return gpt2_run("350m")
