"""The 0.8M-parameter model that rounding damages most, with learned sinks: a logit per head that takes attention.

Reproduces: preventions_sinks/adam_sinks
Command:    orthojax train --config=configs/recommended.py
            orthojax evaluate --checkpoint=runs/recommended
Expected:   perplexity 15.4, of which coarse int8 costs 1.5% and w4a4 11%; with softmax 15.5, 7% and 18% (three seeds,
            docs/which_recipe.md). The text repeats every passage, which makes heads that copy within minutes.
Hardware:   two CPU cores, about 0.1 s a step.
"""

from orthojax.config import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig
from orthojax.model.presets import gpt2


def get_config() -> Config:
    return Config(
        model=gpt2(
            "tiny",
            d_mlp=256,
            mlp="swiglu",
            norm="rmsnorm_single",  # one scale in every norm
            use_bias=False,
            position="rotary",
            max_length=64,
            normalizer="learned_sink",
            scan_layers=False,  # compiles slower, runs faster
        ),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=3e-3,
            warmup_steps=100,
            final_learning_rate_fraction=0.0,
            weight_decay=0.5,
        ),
        data=DataConfig(kind="embedded", tokenizer="bpe:2048", sequence_length=64, bos=True, repeated_share=1.0),
        train=TrainConfig(
            steps=4000,
            batch_size=16,
            probe_every_steps=100,
            eval_every_steps=500,
            checkpoint_every_steps=1000,
        ),
        eval=EvalConfig(sequences=256, batch_size=64),
    )
