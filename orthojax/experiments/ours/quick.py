"""The main job: vanilla against cured on real text, and the sink of Bigram-Backcopy under three normalizers."""

from orthojax.experiments.base_configs import BACKCOPY_MODEL, LANGUAGE_MODEL, cured, with_normalizer
from orthojax.experiments.ours.quick_report import report
from orthojax.experiments.study.study import Experiment
from orthojax.experiments.study.variant import Variant


def _tiny() -> tuple[Variant, ...]:
    return (
        Variant("vanilla", "softmax + Adam", LANGUAGE_MODEL),
        Variant("cured", "softmax-1 + OrthoAdam", cured(LANGUAGE_MODEL)),
        Variant("backcopy_softmax", "softmax", BACKCOPY_MODEL),
        Variant("backcopy_softmax1", "softmax-1", with_normalizer(BACKCOPY_MODEL, "softmax1")),
        Variant("backcopy_relu", "ReLU", with_normalizer(BACKCOPY_MODEL, "relu")),
    )


EXPERIMENT = Experiment(
    name="quick",
    title="the main job: vanilla against cured, and the Backcopy sink",
    scales={"tiny": _tiny},
    report=report,
)
