"""GPT-2 60M on the sources of Python packages: a real run on text that is at hand; minutes on one GPU.

Reproduces: small/long_pair/vanilla; rows GPT2 60M of Table 2 (From Attention to Activation) on other text, with <s>,
            and 98 million tokens where the paper has 21 billion.
Data:       any folder of Python; what it is depends on the packages, its sha256 is kept with every run.
    orthojax prepare '--input=.venv/lib/python3*/site-packages/**/*.py' --tokenizer=bpe:16384 \
        --output=data/python_packages
Command:    orthojax reproduce --experiment=long_pair --scale=small --jobs=2
            trains both at once and measures them; or each alone:
            orthojax train --config=configs/python_packages.py --workdir=runs/packages_vanilla
            and, cured, the same with --workdir=runs/packages_cured --config.model.normalizer=softmax1
            --config.optim.optimizer=orthoadam; stopped at any time, it resumes.
            orthojax evaluate --checkpoint=runs/packages_vanilla
Hardware:   one H200: both in 6.5 minutes. Two CPU cores: 3.5M parameters in 20 minutes, by flags that
            results/README.md has.
Expected:   two seeds, on 73M tokens of the 46 packages of results/small/packages.txt:
            perplexity 7.31 vanilla and 7.32 cured; kurtosis of position 0 120 and 3.0, of the rest 17 and 3.0;
            share of queries whose largest weight is key 0 0.206 and 0.111.
"""

from orthojax.config import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig
from orthojax.model.presets import gpt2


def get_config() -> Config:
    return Config(
        model=gpt2("60m", norm="rmsnorm_single", use_bias=False, vocab_size=16_384, max_length=256, dtype="bfloat16"),
        optim=OptimConfig(optimizer="adam", learning_rate=1e-3, warmup_steps=1000, final_learning_rate_fraction=0.0),
        data=DataConfig(
            kind="tokens",
            paths=("data/python_packages/train.bin", "data/python_packages/validation.bin"),
            tokenizer="bpe:16384",
            sequence_length=256,
            bos=True,
        ),
        train=TrainConfig(
            steps=6000,
            batch_size=64,
            log_every_steps=50,
            probe_every_steps=300,
            probe_sequences=32,
            eval_every_steps=300,
            checkpoint_every_steps=300,
        ),
        eval=EvalConfig(sequences=1024, batch_size=64),
    )
