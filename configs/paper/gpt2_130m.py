"""GPT-2 130M on 42 billion tokens of C4: softmax or softmax-1, Adam or OrthoAdam, 256 to 1,024 tokens.

Reproduces: From Attention to Activation (arXiv 2410.17174):
            rows GPT2 130M of Tables 2 and 3, and those of 130M in Table 6.
Data:       a quarter of C4 (docs/data.md); FILE is GPT-2's tokenizer.json; the same again with --split=validation
    orthojax prepare --tfds_dir=DIR --dataset=c4/en '--split=train[:25%]' --tokenizer=FILE --output=data/c4_gpt2
Command:    orthojax train --config=configs/paper/gpt2_130m.py --workdir=runs/NAME FLAGS
            orthojax evaluate --checkpoint=runs/NAME
Hardware:   as many devices as there are; hours are those of one NVIDIA H200 at 35% of its peak, by the FLOPs of the
            model. The paper had eight V100 of 32 GB.
Expected:   for the FLAGS of each run, what the paper prints ("-": not printed), and hours:
            perplexity | kurtosis of position 0 and of the rest | max |x| of both | share of queries whose
            largest weight is key 0 | perplexity in int8 coarse, moderate, fine | in int4.
            Two misprints of Table 6 are corrected, see orthojax/experiments/from_attention/paper_tables.json.

    (no flags)
      22.89 | 514.9 141.5 | 7018.1 1014.8 | 0.527 | 46.49 28.31 23.07 | 679.9 | 25.4 h
    --config.model.normalizer=softmax1
      22.7 | 175.4 144.2 | 1134.3 967.5 | 0.024 | - - - | - | 25.4 h
    --config.optim.optimizer=orthoadam
      23.1 | 446.4 20.2 | 4285.0 433.4 | 0.424 | - - - | - | 25.4 h
    --config.model.normalizer=softmax1 --config.optim.optimizer=orthoadam
      22.78 | 10.1 7.3 | 318.1 261.6 | 0.019 | 23.21 23.1 22.83 | 24.0 | 25.4 h
    --config.data.sequence_length=512
      22.8 | - - | - - | - | 42.34 28.14 22.98 | - | 51.8 h
    --config.data.sequence_length=1024
      22.93 | - - | - - | - | 38.78 29.04 23.16 | - | 107 h
    --config.data.sequence_length=512 --config.model.normalizer=softmax1 --config.optim.optimizer=orthoadam
      22.73 | - - | - - | - | 23.16 23.04 22.79 | - | 51.8 h
    --config.data.sequence_length=1024 --config.model.normalizer=softmax1 --config.optim.optimizer=orthoadam
      22.87 | - - | - - | - | 23.28 23.19 22.94 | - | 107 h
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
            steps=320_000,
            batch_size=512,
            log_every_steps=100,
            eval_every_steps=10_000,
            checkpoint_every_steps=2_000,
        ),
        eval=EvalConfig(sequences=100_000, batch_size=256),
        mesh=MeshConfig(data=-1),  # every device takes a part of the batch
    )
