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

from orthojax.config import Config, DataConfig, EvalConfig, MeshConfig, OptimConfig, TrainConfig
from orthojax.model.presets import gpt2


def get_config() -> Config:
    return Config(
        model=gpt2(
            "130m", norm="rmsnorm_single", use_bias=False, vocab_size=50_304, normalizer="softmax1", dtype="bfloat16"
        ),
        optim=OptimConfig(
            optimizer="sgd", momentum=0.9, learning_rate=0.2, warmup_steps=2_000, final_learning_rate_fraction=0.0
        ),
        data=DataConfig(
            kind="tokens",
            paths=("data/c4_gpt2/train*.bin", "data/c4_gpt2/validation*.bin"),
            sequence_length=256,
            bos=False,
        ),
        train=TrainConfig(
            steps=320_000,
            batch_size=512,
            log_every_steps=100,
            eval_every_steps=10_000,
            checkpoint_every_steps=2_000,
        ),
        eval=EvalConfig(sequences=100_000, batch_size=256),
        mesh=MeshConfig(data=-1),  # every device takes a part of the batch
    )
