"""The transformer of Active-Dormant Attention Heads, four times narrower: what experiments on causes start from."""

from orthojax.config import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig, replace
from orthojax.model.presets import bigram_backcopy

# At the published rate of 3e-4 a model this narrow needs ten times the steps.
RATE = 3e-3


def narrow(num_layers: int = 1, changes: dict[str, object] | None = None, *, steps: int = 1000) -> Config:
    """One head of width 64, MLPs of 256, 32 x 64 tokens a step, Adam with the published b2 and decay, no warm-up.

    Args:
      num_layers: Of the model.
      changes: Field -> value.
      steps: Of training.
    """
    config = Config(
        model=bigram_backcopy(num_layers, d_model=64, d_mlp=256, max_length=64, vocab_size=104),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=RATE,
            b2=0.99,
            weight_decay=1e-4,
            warmup_steps=0,
            final_learning_rate_fraction=1.0,
            clip_norm=None,
        ),
        data=DataConfig(kind="bigram_backcopy", sequence_length=64),
        train=TrainConfig(steps=steps, batch_size=32, eval_every_steps=100, checkpoint_every_steps=500),
        eval=EvalConfig(sequences=256, batch_size=64),
    )
    return replace(config, changes or {})
