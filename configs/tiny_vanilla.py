"""A 1M-parameter GPT-2 trained the usual way: softmax attention, Adam. What grows outliers.

Reproduces: the vanilla column of the main job.
Command:    orthojax train --config=configs/tiny_vanilla.py
            orthojax evaluate --checkpoint=runs/tiny_vanilla
Expected:   see results/README.md; kurtosis of hidden states well above 3 and rising with the steps.
Hardware:   two CPU cores, about 0.1 s a step.
"""

from orthojax.config import Config
from orthojax.experiments.base_configs import REPEATED_MODEL


def get_config() -> Config:
    return REPEATED_MODEL
