"""GPT-2 130M on 5 billion tokens of C4, one thing changed at a time: what it takes to have no outliers.

Reproduces: From Attention to Activation (arXiv 2410.17174):
            Table 5 but its rows of SGD, and the relaxed causal mask of Figure 2.
Data:       a quarter of C4 (docs/data.md); FILE is GPT-2's tokenizer.json; the same again with --split=validation
    orthojax prepare --tfds_dir=DIR --dataset=c4/en '--split=train[:25%]' --tokenizer=FILE --output=data/c4_gpt2
Command:    orthojax train --config=configs/paper/ablation_130m.py --workdir=runs/NAME FLAGS
            orthojax evaluate --checkpoint=runs/NAME
Hardware:   as many devices as there are; hours are those of one NVIDIA H200 at 35% of its peak, by the FLOPs of the
            model. The paper had eight V100 of 32 GB.
Expected:   for the FLAGS of each run, what the paper prints ("-": not printed), and hours:
            perplexity | kurtosis | max |x| | share of queries whose largest weight is key 0.

    --config.model.use_bias=true --config.model.norm=layernorm
      26.9 | 291.7 | 1675.9 | 0.333 | 3.18 h
    --config.model.norm=layernorm
      26.9 | 263.7 | 1104.0 | 0.308 | 3.18 h
    --config.model.position=none --config.model.norm=layernorm
      27.4 | 283.3 | 1478.7 | 0.197 | 3.18 h
    --config.model.position=rotary --config.model.norm=layernorm
      25.6 | 391.9 | 2577.4 | 0.336 | 3.18 h
    --config.model.norm=layernorm --config.model.normalizer=softmax1
      26.5 | 244.7 | 648.6 | 0.022 | 3.18 h
    --config.model.norm=rmsnorm --config.model.normalizer=softmax1
      26.6 | 230.4 | 628.6 | 0.026 | 3.18 h
    --config.model.normalizer=softmax1
      26.6 | 140.0 | 432.0 | 0.02 | 3.18 h
    --config.optim.optimizer=rmsprop --config.model.normalizer=softmax1
      27.4 | 70.5 | 302.2 | 0.021 | 3.18 h
    --config.optim.optimizer=orthoadam --config.model.normalizer=softmax1
      26.8 | 3.0 | 43.5 | 0.022 | 3.18 h
    --config.optim.optimizer=orthoadam
      27.3 | 323.0 | 726.4 | 0.231 | 3.18 h
    --config.model.norm=rmsnorm --config.optim.optimizer=orthoadam --config.model.normalizer=softmax1
      26.7 | 380.9 | 737.2 | 0.025 | 3.18 h
    --config.model.norm=layernorm --config.optim.optimizer=orthoadam --config.model.normalizer=softmax1
      26.6 | 188.4 | 514.6 | 0.023 | 3.18 h
    --config.model.relaxed_causal_tokens=10
      - | - | - | - | 3.18 h
"""

from orthojax.config import Config, DataConfig, EvalConfig, MeshConfig, OptimConfig, TrainConfig
from orthojax.model.presets import gpt2


def get_config() -> Config:
    return Config(
        model=gpt2("130m", norm="rmsnorm_single", use_bias=False, vocab_size=50_304, dtype="bfloat16"),
        optim=OptimConfig(optimizer="adam", learning_rate=1e-3, warmup_steps=2_000, final_learning_rate_fraction=0.0),
        data=DataConfig(
            kind="tokens",
            paths=("data/c4_gpt2/train*.bin", "data/c4_gpt2/validation*.bin"),
            sequence_length=256,
            bos=False,
        ),
        train=TrainConfig(
            steps=40_000,
            batch_size=512,
            log_every_steps=100,
            eval_every_steps=10_000,
            checkpoint_every_steps=2_000,
        ),
        eval=EvalConfig(sequences=100_000, batch_size=256),
        mesh=MeshConfig(data=-1),  # every device takes a part of the batch
    )
