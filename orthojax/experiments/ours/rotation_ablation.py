"""Which rotation OrthoAdam should have: one factor at a time, with the controls that tell what does the work."""

from orthojax.config import Config
from orthojax.experiments.base_configs import LANGUAGE_MODEL, cured, with_normalizer
from orthojax.experiments.ours.rotation_report import report
from orthojax.experiments.study.study import Experiment
from orthojax.experiments.study.variant import Variant
from orthojax.fields import replace

BASE = replace(cured(LANGUAGE_MODEL), {"train.steps": 500})


def _rotated(name: str, label: str, **rotation: object) -> Variant:
    return Variant(name, label, replace(BASE, {f"optim.rotation.{key}": value for key, value in rotation.items()}))


def _adam(config: Config) -> Config:
    return replace(config, {"optim.optimizer": "adam"})


REFERENCES = (
    Variant("vanilla", "softmax, Adam", with_normalizer(_adam(BASE), "softmax")),
    Variant("adam", "softmax-1, Adam", _adam(BASE)),
)
KINDS_AND_AXES = tuple(
    _rotated(f"{kind}_{axes}", f"{kind}, {axes}", kind=kind, axes=axes)
    for kind, axes in (
        ("hadamard", "output"),
        ("haar", "output"),
        ("dct", "output"),
        ("hadamard", "both"),
        ("haar", "both"),
        ("hadamard", "residual"),
        ("hadamard", "writers"),
        ("hadamard", "input"),
    )
)
EMBEDDINGS = (
    _rotated("no_embeddings", "hadamard, output, not the embeddings", embeddings=False),
    _rotated("embeddings_only", "hadamard, embeddings alone", axes="none"),
    _rotated("input_no_embeddings", "hadamard, input, not the embeddings", axes="input", embeddings=False),
)
CONTROLS = (
    _rotated("identity", "identity", kind="identity"),
    _rotated("signed_permutation", "signed permutation, both", kind="signed_permutation", axes="both"),
    _rotated("shared", "one hadamard for the whole tree, residual", scope="tree", axes="residual"),
    Variant(
        "fixed_in_model", "fixed hadamard in the model, Adam", replace(_adam(BASE), {"model.fixed_rotation": True})
    ),
)
SETTINGS = tuple(
    Variant(f"{axes}_{name}", f"hadamard, {axes}, {label}", replace(BASE, {"optim.rotation.axes": axes, **change}))
    for name, label, change in (
        ("warmup_300", "300 steps of warm-up", {"optim.warmup_steps": 300}),
        ("b2_095", "b2 = 0.95", {"optim.b2": 0.95}),
        ("eps_1e-4", "eps = 1e-4", {"optim.eps": 1e-4}),
    )
    for axes in ("output", "both")
)

EXPERIMENT = Experiment(
    name="rotation_ablation",
    title="which rotation for OrthoAdam: kinds, axes and controls, one factor at a time",
    scales={"tiny": lambda: (*REFERENCES, *KINDS_AND_AXES, *EMBEDDINGS, *CONTROLS, *SETTINGS)},
    report=report,
    cost_reference=lambda _: "adam",
)
