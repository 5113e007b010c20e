"""What the papers measure, as functions on arrays, and as statistics that a model reduces to while it runs.

From Attention to Activation (arXiv 2410.17174): kurtosis, largest activations, norm ratio, attention to the first key.
Active-Dormant Attention Heads (arXiv 2410.13835): sinks, value-state drains, residual-state peaks, Bigram-Backcopy.
"""

from orthojax.analysis.activations import (
    kurtosis_first,
    kurtosis_pooled,
    kurtosis_rest,
    max_abs_first,
    max_abs_first_maximum,
    max_abs_rest,
    max_abs_rest_maximum,
    norm_ratio_first,
    norm_ratio_rest,
    residual_norm_first,
    residual_norm_rest,
)
from orthojax.analysis.attention import (
    first_attention_fraction,
    first_attention_mass,
    first_attention_mass_by_head,
    first_attention_share,
    sink_rate,
)
from orthojax.analysis.backcopy import (
    backcopy_risk_nats,
    bigram_excess_risk_nats,
    sink_attention,
    sink_attention_rest,
    sink_logit_gap,
)
from orthojax.analysis.bases import in_singular_basis
from orthojax.analysis.channels import (
    channel_norms,
    extreme_overlap,
    outlier_scores,
    rank_correlation,
    summed_second_moments,
    top_count,
)
from orthojax.analysis.key_positions import (
    attention_fraction_by_key,
    attention_mass_by_key,
    equal_logits_mass,
    uniformity_p_value,
)
from orthojax.analysis.measure import concatenate, measure
from orthojax.analysis.observe import (
    Statistics,
    Taps,
    combine,
    finalize,
    observe_backcopy,
    observe_backcopy_risks,
    observe_language_model,
)
from orthojax.analysis.values import value_norm_first, value_norm_rest

__all__ = [
    "Statistics",
    "Taps",
    "attention_fraction_by_key",
    "attention_mass_by_key",
    "backcopy_risk_nats",
    "bigram_excess_risk_nats",
    "channel_norms",
    "combine",
    "concatenate",
    "equal_logits_mass",
    "extreme_overlap",
    "finalize",
    "first_attention_fraction",
    "first_attention_mass",
    "first_attention_mass_by_head",
    "first_attention_share",
    "in_singular_basis",
    "kurtosis_first",
    "kurtosis_pooled",
    "kurtosis_rest",
    "max_abs_first",
    "max_abs_first_maximum",
    "max_abs_rest",
    "max_abs_rest_maximum",
    "measure",
    "norm_ratio_first",
    "norm_ratio_rest",
    "observe_backcopy",
    "observe_backcopy_risks",
    "observe_language_model",
    "outlier_scores",
    "rank_correlation",
    "residual_norm_first",
    "residual_norm_rest",
    "sink_attention",
    "sink_attention_rest",
    "sink_logit_gap",
    "sink_rate",
    "summed_second_moments",
    "top_count",
    "uniformity_p_value",
    "value_norm_first",
    "value_norm_rest",
]
