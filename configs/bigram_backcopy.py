"""One layer on Bigram-Backcopy: the sink on <s> and its value drain, within seconds.

Reproduces: quick/backcopy_softmax, the model of Active-Dormant Attention Heads, four times narrower.
Command:    orthojax train --config=configs/bigram_backcopy.py
            orthojax evaluate --checkpoint=runs/bigram_backcopy
            --config.model.normalizer=softmax1 or relu for the other columns
            --config.data.rule=in_context_bigram, bigram_backward, skip_bigram or markov for the related tasks;
            data.bos_tokens=0 or 2, data.delimiter=true; data.paths=FILE for the bigrams of another text,
            with model.vocab_size to match
Expected:   see results/README.md; attention on <s> at non-triggers 0.85 (0.66 to 0.94, five seeds) after 400 steps.
Hardware:   two CPU cores, about 15 s.
"""

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, RotationConfig, TrainConfig


def get_config() -> Config:
    return Config(
        # One head, LayerNorm and linear layers with biases, embeddings of standard deviation 1 and kernels of
        # 1 / sqrt(3 d_model), as the published code has them.
        model=ModelConfig(
            vocab_size=128,
            max_length=64,
            d_model=64,
            num_layers=1,
            num_heads=1,
            d_mlp=256,
            norm="layernorm",
            use_bias=True,
            normalizer="softmax",
            mlp="relu",
            tie_embeddings=False,
            embedding_init_std=1.0,
            init_std=0.072,
            scan_layers=False,
        ),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=3e-3,
            warmup_steps=20,
            final_learning_rate_fraction=1.0,
            rotation=RotationConfig(axes="output"),
        ),
        data=DataConfig(kind="bigram_backcopy", sequence_length=64),
        train=TrainConfig(steps=400, batch_size=64, checkpoint_every_steps=100, eval_every_steps=50),
        eval=EvalConfig(sequences=256, batch_size=64),
    )
