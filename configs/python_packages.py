"""GPT-2 60M on the sources of the Python packages of this environment: a real run on text that is at hand.

Reproduces: rows GPT2 60M of Table 2 (From Attention to Activation), vanilla and cured, on other text and 3,000 steps.
Data:       about 115 MB of Python; what it is depends on the installed packages, its sha256 is kept with every run.
    orthojax prepare '--input=.venv/lib/python3*/site-packages/**/*.py' --tokenizer=bpe:16384 \
        --output=data/python_packages
Command:    orthojax train --config=configs/python_packages.py --workdir=runs/packages_vanilla
            and, cured, the same with --workdir=runs/packages_cured --config.model.normalizer=softmax1
            --config.optim.optimizer=orthoadam; stopped at any time, it resumes.
            orthojax evaluate --checkpoint=runs/packages_vanilla
Hardware:   one GPU: 393 million tokens, some 13 times over the text, so that it is memorised: not yet run.
            Two CPU cores: 3.5M parameters in 20 minutes by the flags that results/README.md has; 0.09 of an epoch.
Expected:   there, one seed: perplexity 41.1 vanilla and 42.4 cured; kurtosis of the rest 13.3 and 3.0,
            with the output axis of every kernel rotated, the default at the time.
"""

from orthojax.config import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig
from orthojax.model.presets import gpt2


def get_config() -> Config:
    return Config(
        model=gpt2("60m", norm="rmsnorm_single", use_bias=False, vocab_size=16_384, max_length=256, dtype="bfloat16"),
        optim=OptimConfig(optimizer="adam", learning_rate=1e-3, warmup_steps=200),
        data=DataConfig(
            kind="tokens",
            paths=("data/python_packages/train.bin", "data/python_packages/validation.bin"),
            sequence_length=256,
        ),
        train=TrainConfig(steps=3000, batch_size=512, eval_every_steps=500, checkpoint_every_steps=250),
        eval=EvalConfig(sequences=1024, batch_size=64),
    )
