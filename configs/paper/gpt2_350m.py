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

from orthojax.config import Config, DataConfig, EvalConfig, MeshConfig, OptimConfig, TrainConfig
from orthojax.model.presets import gpt2


def get_config() -> Config:
    return Config(
        model=gpt2("350m", norm="rmsnorm_single", use_bias=False, vocab_size=50_304, dtype="bfloat16"),
        optim=OptimConfig(optimizer="adam", learning_rate=1e-3, warmup_steps=6_000, final_learning_rate_fraction=0.0),
        data=DataConfig(
            kind="tokens",
            paths=("data/c4_gpt2/train*.bin", "data/c4_gpt2/validation*.bin"),
            sequence_length=256,
            bos=False,
        ),
        train=TrainConfig(
            steps=960_000,
            batch_size=512,
            log_every_steps=100,
            eval_every_steps=10_000,
            checkpoint_every_steps=2_000,
        ),
        eval=EvalConfig(sequences=100_000, batch_size=256),
        mesh=MeshConfig(fsdp=-1),  # parameters and batch are split over all devices
    )
