"""Llama 2 130M on 42 billion tokens of C4: softmax or softmax-1, Adam or OrthoAdam.

Reproduces: From Attention to Activation (arXiv 2410.17174):
            rows Llama2 130M of Tables 2 and 3.
Data:       a quarter of C4 (docs/data.md); FILE is Llama 2's tokenizer.model; the same again with --split=validation
    orthojax prepare --tfds_dir=DIR --dataset=c4/en '--split=train[:25%]' --tokenizer=FILE --output=data/c4_llama2
Command:    orthojax train --config=configs/paper/llama2_130m.py --workdir=runs/NAME FLAGS
            orthojax evaluate --checkpoint=runs/NAME
Hardware:   as many devices as there are; hours are those of one NVIDIA H200 at 35% of its peak, by the FLOPs of the
            model. The paper had eight V100 of 32 GB.
Expected:   for the FLAGS of each run, what the paper prints ("-": not printed), and hours:
            perplexity | kurtosis of position 0 and of the rest | max |x| of both | share of queries whose
            largest weight is key 0 | perplexity in int8 coarse, moderate, fine | in int4.

    (no flags)
      17.39 | 435.0 170.0 | 4622.7 1627.4 | 0.105 | 43.61 24.46 17.69 | 21.5 | 22.6 h
    --config.model.normalizer=softmax1
      17.2 | 208.2 181.2 | 1340.4 1229.5 | 0.016 | - - - | - | 22.6 h
    --config.optim.optimizer=orthoadam
      17.4 | 435.8 169.5 | 4685.9 1629.1 | 0.103 | - - - | - | 22.6 h
    --config.model.normalizer=softmax1 --config.optim.optimizer=orthoadam
      17.31 | 4.2 6.9 | 161.1 157.0 | 0.017 | 20.85 20.11 17.38 | 19.7 | 22.6 h
"""

from orthojax.config import Config, DataConfig, EvalConfig, MeshConfig, OptimConfig, TrainConfig
from orthojax.model.presets import llama2


def get_config() -> Config:
    return Config(
        model=llama2("130m", norm="rmsnorm_single", dtype="bfloat16"),
        optim=OptimConfig(optimizer="adam", learning_rate=1e-3, warmup_steps=2_000, final_learning_rate_fraction=0.0),
        data=DataConfig(
            kind="tokens",
            paths=("data/c4_llama2/train*.bin", "data/c4_llama2/validation*.bin"),
            sequence_length=256,
            bos=True,
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
