"""GPT-2 60M on 21 billion tokens of C4: softmax or softmax-1, Adam or OrthoAdam, 256 to 1,024 tokens a sequence.

Reproduces: From Attention to Activation (arXiv 2410.17174):
            rows GPT2 60M of Tables 2 and 3, and those of 60M in Table 6.
Data:       a quarter of C4 (docs/data.md); FILE is GPT-2's tokenizer.json; the same again with --split=validation
    orthojax prepare --tfds_dir=DIR --dataset=c4/en '--split=train[:25%]' --tokenizer=FILE --output=data/c4_gpt2
Command:    orthojax train --config=configs/paper/gpt2_60m.py --workdir=runs/NAME FLAGS
            orthojax evaluate --checkpoint=runs/NAME
Hardware:   as many devices as there are; hours are those of one NVIDIA H200 at 35% of its peak, by the FLOPs of the
            model. The paper had eight V100 of 32 GB.
Expected:   for the FLAGS of each run, what the paper prints ("-": not printed), and hours:
            perplexity | kurtosis of position 0 and of the rest | max |x| of both | share of queries whose
            largest weight is key 0 | perplexity in int8 coarse, moderate, fine | in int4.
            Two misprints of Table 6 are corrected, see orthojax/experiments/from_attention/paper_tables.json.

    (no flags)
      31.88 | 313.8 77.9 | 1856.1 266.6 | 0.489 | 43.53 34.87 32.15 | 68.5 | 6.57 h
    --config.model.normalizer=softmax1
      31.6 | 105.6 81.4 | 304.9 259.0 | 0.021 | - - - | - | 6.57 h
    --config.optim.optimizer=orthoadam
      32.4 | 260.8 10.6 | 1419.9 114.7 | 0.365 | - - - | - | 6.57 h
    --config.model.normalizer=softmax1 --config.optim.optimizer=orthoadam
      31.83 | 7.6 7.0 | 92.8 87.8 | 0.019 | 32.3 32.18 31.89 | 33.9 | 6.57 h
    --config.data.sequence_length=512
      32.66 | - - | - - | - | 48.55 37.24 33.07 | - | 13.5 h
    --config.data.sequence_length=1024
      33.52 | - - | - - | - | 57.68 38.22 33.8 | - | 28.2 h
    --config.data.sequence_length=512 --config.model.normalizer=softmax1 --config.optim.optimizer=orthoadam
      31.93 | - - | - - | - | 32.46 32.32 32.0 | - | 13.5 h
    --config.data.sequence_length=1024 --config.model.normalizer=softmax1 --config.optim.optimizer=orthoadam
      32.25 | - - | - - | - | 32.85 32.73 32.32 | - | 28.2 h
"""

from orthojax.config import Config, DataConfig, EvalConfig, MeshConfig, OptimConfig, TrainConfig
from orthojax.model.presets import gpt2


def get_config() -> Config:
    return Config(
        model=gpt2("60m", norm="rmsnorm_single", use_bias=False, vocab_size=50_304, dtype="bfloat16"),
        optim=OptimConfig(optimizer="adam", learning_rate=1e-3, warmup_steps=1_000, final_learning_rate_fraction=0.0),
        data=DataConfig(
            kind="tokens",
            paths=("data/c4_gpt2/train*.bin", "data/c4_gpt2/validation*.bin"),
            sequence_length=256,
            bos=False,
        ),
        train=TrainConfig(
            steps=160_000,
            batch_size=512,
            log_every_steps=100,
            eval_every_steps=10_000,
            checkpoint_every_steps=2_000,
        ),
        eval=EvalConfig(sequences=100_000, batch_size=256),
        mesh=MeshConfig(data=-1),  # every device takes a part of the batch
    )
