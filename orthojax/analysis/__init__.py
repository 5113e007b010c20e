"""The papers' measures as functions on arrays, and as statistics that a model reduces to while it runs.

From Attention to Activation (arXiv 2410.17174): kurtosis, largest activations, norm ratio, attention to the first key.
Active-Dormant Attention Heads (arXiv 2410.13835): sinks, value-state drains, residual-state peaks, Bigram-Backcopy.
"""

from orthojax.analysis.activations import gaussian_max_over_median as gaussian_max_over_median
from orthojax.analysis.activations import gaussian_norm_ratio as gaussian_norm_ratio
from orthojax.analysis.activations import kurtosis_first as kurtosis_first
from orthojax.analysis.activations import kurtosis_pooled as kurtosis_pooled
from orthojax.analysis.activations import kurtosis_rest as kurtosis_rest
from orthojax.analysis.activations import max_abs_first as max_abs_first
from orthojax.analysis.activations import max_abs_first_maximum as max_abs_first_maximum
from orthojax.analysis.activations import max_abs_rest as max_abs_rest
from orthojax.analysis.activations import max_abs_rest_maximum as max_abs_rest_maximum
from orthojax.analysis.activations import max_over_median as max_over_median
from orthojax.analysis.activations import norm_ratio_first as norm_ratio_first
from orthojax.analysis.activations import norm_ratio_rest as norm_ratio_rest
from orthojax.analysis.activations import osp_kurtosis as osp_kurtosis
from orthojax.analysis.activations import residual_norm_first as residual_norm_first
from orthojax.analysis.activations import residual_norm_rest as residual_norm_rest
from orthojax.analysis.activations import value_norm_first as value_norm_first
from orthojax.analysis.activations import value_norm_rest as value_norm_rest
from orthojax.analysis.attention import active_shares as active_shares
from orthojax.analysis.attention import activity_histogram as activity_histogram
from orthojax.analysis.attention import attention_entropy_by_head as attention_entropy_by_head
from orthojax.analysis.attention import chance_of_first as chance_of_first
from orthojax.analysis.attention import first_attention_fraction as first_attention_fraction
from orthojax.analysis.attention import first_attention_mass as first_attention_mass
from orthojax.analysis.attention import first_attention_mass_by_head as first_attention_mass_by_head
from orthojax.analysis.attention import gu_sink_rate as gu_sink_rate
from orthojax.analysis.attention import head_activity as head_activity
from orthojax.analysis.attention import null_mass_by_head as null_mass_by_head
from orthojax.analysis.attention import sink_rate as sink_rate
from orthojax.analysis.backcopy import backcopy_excess_risk_nats as backcopy_excess_risk_nats
from orthojax.analysis.backcopy import backcopy_risk_nats as backcopy_risk_nats
from orthojax.analysis.backcopy import bigram_excess_risk_nats as bigram_excess_risk_nats
from orthojax.analysis.backcopy import sink_attention as sink_attention
from orthojax.analysis.backcopy import sink_attention_rest as sink_attention_rest
from orthojax.analysis.catalogue import CATALOGUE as CATALOGUE
from orthojax.analysis.catalogue import Conditions as Conditions
from orthojax.analysis.catalogue import Definition as Definition
from orthojax.analysis.catalogue import chance as chance
from orthojax.analysis.catalogue import compared_with as compared_with
from orthojax.analysis.catalogue import conditions as conditions
from orthojax.analysis.catalogue import define as define
from orthojax.analysis.catalogue import label as label
from orthojax.analysis.catalogue import show as show
from orthojax.analysis.extremes import Extremes as Extremes
from orthojax.analysis.extremes import largest_activations as largest_activations
from orthojax.analysis.extremes import observe_extremes as observe_extremes
from orthojax.analysis.extremes import secondary_sinks as secondary_sinks
from orthojax.analysis.observe import Statistics as Statistics
from orthojax.analysis.observe import combine as combine
from orthojax.analysis.observe import concatenate as concatenate
from orthojax.analysis.observe import finalize as finalize
from orthojax.analysis.observe import finalize_arrays as finalize_arrays
from orthojax.analysis.observe import measure as measure
from orthojax.analysis.observe import observe_backcopy as observe_backcopy
from orthojax.analysis.observe import observe_backcopy_risks as observe_backcopy_risks
from orthojax.analysis.observe import observe_language_model as observe_language_model
from orthojax.analysis.observe import observe_predictors as observe_predictors
from orthojax.analysis.sink_logits import logit_summary as logit_summary
from orthojax.analysis.sink_logits import logit_sums as logit_sums
from orthojax.analysis.sink_logits import sink_logit_gap as sink_logit_gap
from orthojax.analysis.summary import Summary as Summary
from orthojax.analysis.summary import summarize as summarize
from orthojax.model import Taps as Taps
