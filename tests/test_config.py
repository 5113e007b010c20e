import dataclasses
import json
import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthojax.config import (
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    Mlp,
    ModelConfig,
    OptimConfig,
    RotationConfig,
    TrainConfig,
    aliases,
    changed_fields,
    describe_fields,
    describe_type,
    field_paths,
    fields_affecting,
    flatten,
    from_dict,
    from_json,
    read_value,
    replace,
    to_json,
)
from orthojax.errors import UserError, nearest
from orthojax.model.presets import gpt2

PATHS = field_paths(Config)
COMMANDS = sorted((Path(__file__).parents[1] / "orthojax/commands").glob("*.py"))


def refusal(call, *args) -> list[str]:
    """The lines of the error that a call must raise: at most three, none of them empty."""
    with pytest.raises(UserError) as caught:
        call(*args)
    lines = str(caught.value).split("\n")
    assert 1 <= len(lines) <= 3
    assert all(line.strip() and len(line) < 400 for line in lines)
    return lines


# Reading what was typed.


READ = [
    *(("12", int, 12), (" 12 ", int, 12), ("-3", int, -3), ("1e3", int, 1000), ("1.5e2", int, 150)),
    *(("3e-4", float, 3e-4), ("2", float, 2.0), ("true", bool, True), ("False", bool, False)),
    *(("some text", str, "some text"), ("12", str, "12")),
    *(("none", int | None, None), ("None", float | None, None), ("4", int | None, 4), ("0.5", float | None, 0.5)),
    *(("relu", Mlp, "relu"), (" relu ", Mlp, "relu"), ("relu", Mlp | tuple[Mlp, ...], "relu")),
    *((text, Mlp | tuple[Mlp, ...], ("relu", "gelu")) for text in ("relu,gelu", "relu, gelu", "relu,gelu,")),
    ("relu,", Mlp | tuple[Mlp, ...], ("relu",)),
    ("true", bool | tuple[bool, ...], True),
    ("true,false", bool | tuple[bool, ...], (True, False)),
    *(("a.txt,b.txt", tuple[str, ...], ("a.txt", "b.txt")), ("a.txt", tuple[str, ...], ("a.txt",))),
    ("", tuple[str, ...], ()),
]
UNREADABLE = [
    *((text, int) for text in ("1.5", "one", "", "nan", "true")),
    *((text, float) for text in ("fast", "")),
    *((text, bool) for text in ("1", "yes", "")),
    *(("nothing", int | None), ("x", type(None))),
    *(("RELU", Mlp), ("", Mlp), ("relu;gelu", Mlp | tuple[Mlp, ...]), ("true,maybe", bool | tuple[bool, ...])),
]


def test_every_type_is_read_from_text_or_refused():
    for text, hint, value in READ:
        read = read_value(text, hint)
        assert (read, type(read)) == (value, type(value)), (text, hint)
    for text, hint in UNREADABLE:
        with pytest.raises(ValueError):  # noqa: PT011
            read_value(text, hint)
    assert all(describe_type(hint) for hint in PATHS.values())


# Overrides.

OVERRIDES = {
    "model.d_model": ("256", 256),
    "model.num_kv_heads": ("2", 2),
    "model.position": ("rotary", "rotary"),
    "model.attention": ("true", True),
    "model.scan_layers": ("false", False),
    "optim.learning_rate": ("3e-4", 3e-4),
    "optim.clip_norm": ("none", None),
    "optim.rotation.kind": ("haar", "haar"),
    "data.tokenizer": ("bytes", "bytes"),
    "train.steps": ("2e3", 2000),
    "eval.sequences": ("64", 64),
}


def test_one_override_changes_one_field():
    for path, (text, value) in OVERRIDES.items():
        expected = {path: value} if path != "model.attention" else {}
        assert changed_fields(Config(), replace(Config(), {path: text})) == expected
        assert replace(Config(), {path: value}) == replace(Config(), {path: text})
    assert replace(Config(), {"data.tokenizer": "true"}).data.tokenizer == "true"  # a text stays a text
    assert replace(Config(), {}) == Config()
    assert changed_fields(Config(), Config()) == {}


def test_fields_that_must_agree_change_together_in_any_order():
    together = {"model.d_model": "6", "model.num_heads": "3"}
    for changes in (together, dict(reversed(together.items()))):
        config = replace(Config(), changes)
        assert (config.model.d_model, config.model.num_heads, config.model.head_dim) == (6, 3, 2)
    refusal(replace, Config(), {"model.d_model": "6"})
    config = replace(Config(), {"data.kind": "text", "data.paths": "a,b"})
    assert config.data.paths == ("a", "b")
    per_layer = {"model.num_layers": 2, "model.mlp": "relu,none", "model.scan_layers": "false"}
    assert replace(Config(), per_layer).model.layer_mlp(1) == "none"


BAD_OVERRIDES = [
    ("model.d_modle", "3", ["d_modle", "model.d_model"]),
    ("d_model", "3", ["'d_model'", "model."]),
    ("optim.learning_rte", "3", ["optim.learning_rate"]),
    ("optim.rotation.knd", "haar", ["optim.rotation.kind"]),
    ("model", "gpt2", ["model.d_model"]),
    ("modle.d_model", "3", ["did you mean 'model.d_model'?"]),
    ("", "3", ["''"]),
    ("model.d_model", "wide", ["model.d_model='wide'", "an integer"]),
    ("model.d_model", "1e400", ["1e400", "an integer"]),
    ("model.d_model", 12.5, ["12.5", "an integer"]),
    ("model.d_model", True, ["True", "an integer"]),
    ("model.d_model", None, ["None", "an integer"]),
    ("model.d_model", 0, ["model.d_model=0", "positive"]),
    ("model.d_model", 130, ["130", "4", "a multiple of 4"]),
    ("model.num_kv_heads", "3", ["num_kv_heads=3", "a divisor of 4"]),
    ("model.num_kv_heads", "0", ["num_kv_heads=0"]),
    ("model.num_kv_heads", "1e400", ["1e400"]),
    ("model.use_bias", 1, ["1", "true | false"]),
    ("model.position", "rotry", ["rotry", "learned | rotary | none", "did you mean 'rotary'?"]),
    ("model.mlp", "swigl", ["swigl", "did you mean 'swiglu'?"]),
    ("model.mlp", "gelu,gelu", ["2 layers", "num_layers=4", "one for each layer"]),
    ("model.mlp", "gelu,gelu,relu,relu", ["differs between layers", "scan_layers=false"]),
    ("model.attention", "true,true,true,false", ["differs between layers", "scan_layers=false"]),
    ("model.attention", (True, 1, True, True), ["true | false"]),
    ("model.normalizer_n", "-1", ["-1", ">= 0"]),
    ("model.normalizer_n", "inf", ["inf", "finite"]),
    ("model.normalizer_gamma", "0.1", ["normalizer_gamma=0.1", "<= 0"]),
    ("model.normalizer_gamma", "nan", ["nan", "finite"]),
    ("model.normalizer_zeta", "0.9", ["normalizer_zeta=0.9", ">= 1"]),
    ("model.normalizer_zeta", "inf", ["inf", "finite"]),
    ("model.rope_theta", "nan", ["nan", "finite"]),
    ("model.norm_eps", "0", ["norm_eps=0", "positive"]),
    ("model.relaxed_causal_tokens", "-1", ["-1", "0 to"]),
    ("model.relaxed_causal_tokens", "64", ["64", "data.sequence_length=64"]),
    ("model.max_length", "32", ["sequence_length=64", "max_length=32"]),
    ("optim.rotated", "true", ["optim.rotated=true", "'orthoadam'"]),
    ("model.fixed_rotation", "true", ["fixed_rotation", "scan_layers=false"]),
    ("optim.optimizer", "ortoadam", ["ortoadam", "did you mean 'orthoadam'?"]),
    ("optim.learning_rate", "0", ["learning_rate=0", "positive"]),
    ("optim.learning_rate", "nan", ["nan"]),
    ("optim.b1", "1", ["b1=1", "< 1"]),
    ("optim.weight_decay", "-0.1", ["-0.1"]),
    ("optim.weight_decay", "inf", ["inf", "finite"]),
    ("optim.clip_norm", "0", ["clip_norm=0", "none"]),
    ("optim.clip_norm", "big", ["big", "none"]),
    ("optim.warmup_steps", "1000", ["warmup_steps=1000", "train.steps=1000", "optim.warmup_steps of 0 to 999"]),
    ("optim.warmup_steps", "-1", ["-1"]),
    ("optim.final_learning_rate_fraction", "1.1", ["1.1", "0 to 1"]),
    ("optim.rotation.seed", "-1", ["-1"]),
    ("data.kind", "text", ["without files", "data.paths"]),
    ("data.kind", "tokens", ["0 files", "TRAIN"]),
    ("data.paths", "a.txt", ["a.txt", "embedded"]),
    ("data.paths", ["a.txt"], ["a.txt", "comma-separated"]),
    ("data.sequence_length", "1", ["sequence_length=1", "at least 2"]),
    ("data.seed", str(2**32), [str(2**32)]),
    ("data.trigger_count", "0", ["trigger_count=0"]),
    ("data.rule", "backcpy", ["did you mean 'backcopy'?"]),
    ("data.bos_tokens", "3", ["bos_tokens=3", "0, 1 or 2"]),
    ("data.other_rule_probability", "nan", ["nan", "0 to 1"]),
    ("data.counts", "a.json", ["a.json", "'embedded'", "bigram_backcopy"]),
    ("train.batch_size", "0", ["batch_size=0", "at least 1"]),
    ("train.eval_every_steps", "-1", ["-1"]),
    ("eval.sequences", "0", ["sequences=0", "at least 1"]),
    ("eval.batch_size", "0", ["batch_size=0"]),
    ("model.d_model", "1\n2\n3\n4", ["an integer"]),
    ("model.a\nb\nc\nd", "1", ["unknown", "--help"]),
    ("optim.lr", "3", ["did you mean 'optim.learning_rate'?"]),
    ("lr", "3", ["did you mean 'optim.learning_rate'?"]),
    ("train.max_iters", "3", ["did you mean 'train.steps'?"]),
    ("train.max_iter", "3", ["did you mean 'train.steps'"]),
    ("model.n_embd", "3", ["did you mean 'model.d_model'?"]),
    ("model.block_size", "3", ["did you mean 'model.max_length' or 'data.sequence_length'?"]),
    ("per_device_train_batch_size", "3", ["did you mean 'train.batch_size'?"]),
    ("Batch-Size", "3", ["did you mean 'train.batch_size' or 'eval.batch_size'?"]),
    ("optim.seed", "3", ["'train.seed', 'data.seed' or 'optim.rotation.seed'"]),
    ("model.dropout", "0.1", ["no dropout"]),
]


def test_a_bad_override_is_refused_in_three_lines_that_help():
    for path, value, words in BAD_OVERRIDES:
        text = "\n".join(refusal(replace, Config(), {path: value}))
        assert all(word in text for word in words), (path, value, text)
    task = {"data.kind": "bigram_backcopy", "data.counts": "a.json", "data.paths": ("b.txt",)}
    assert refusal(replace, Config(), task)[1] == "allowed: one of them"
    short = {"data.delimiter": True, "data.bos_tokens": 2, "data.sequence_length": 4}
    assert refusal(replace, Config(), short)[1] == "allowed: a sequence_length of at least 5"
    assert replace(Config(), short | {"data.sequence_length": 5}).data.middle == 3
    lines = refusal(replace, Config(), {"model.position": "rotary", "model.d_model": 12, "model.num_heads": 4})
    assert "= 3" in lines[0]
    assert "'dots'" in refusal(replace, Config(), {"model.remat": "dot"})[-1]


# Configs built in Python are held to the same types as overrides.


WRONG_VALUES = [
    (ModelConfig, "norm", "layer_norm", "did you mean 'layernorm'?"),
    (ModelConfig, "mlp", ["gelu"] * 4, "comma-separated"),
    (ModelConfig, "mlp", ("gelu", "gelu", "gelu", "rely"), "gelu"),
    (ModelConfig, "d_model", "128", "an integer"),
    (ModelConfig, "scan_layers", "false", "true | false"),
    (RotationConfig, "axes", "outputs", "did you mean 'output'?"),
    (OptimConfig, "rotation", "haar", "RotationConfig"),
    (DataConfig, "paths", "file.txt", "comma-separated"),
    (MeshConfig, "data", True, "an integer"),
    (TrainConfig, "steps", 1e3, "an integer"),
    (EvalConfig, "sequences", "256", "an integer"),
    (Config, "model", OptimConfig(), "ModelConfig"),
]


def test_a_config_built_with_a_wrong_value_is_refused():
    for cls, field, value, word in WRONG_VALUES:
        text = "\n".join(refusal(lambda c=cls, f=field, v=value: c(**{f: v})))
        assert f"{field}=" in text
        assert word in text


# JSON.


def _values(hint: Any) -> st.SearchStrategy:
    """Values of an annotation, small enough to be allowed nearly everywhere."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return st.none()
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(_values(args[0]), max_size=4).map(tuple)
    if args:
        return st.one_of([_values(arg) for arg in args])
    if hint is float:
        return st.floats(0.0, 1e6) | st.sampled_from([1e-8, 0.5, 0.1 + 0.2, 5e-324])
    return {int: st.integers(0, 512), bool: st.booleans(), str: st.text(max_size=8)}[hint]


@st.composite
def configs(draw):
    """A valid config that differs from the default in some fields; changes that alone are impossible are left out."""
    config = Config()
    for path in draw(st.lists(st.sampled_from(sorted(PATHS)), max_size=12, unique=True)):
        try:
            config = replace(config, {path: draw(_values(PATHS[path]))})
        except UserError:
            continue
    return config


@given(configs())
def test_json_round_trip(config):
    assert from_json(Config, to_json(config)) == config
    assert json.loads(to_json(config))  # plain JSON: no NaN, no Infinity
    assert "Infinity" not in to_json(config)


@given(configs(), configs())
def test_changed_fields_is_the_inverse_of_replace(base, config):
    changes = changed_fields(base, config)
    assert replace(base, changes) == config
    assert set(changes) <= set(PATHS)
    assert all(flatten(base)[path] != value for path, value in changes.items())


@given(st.sampled_from(sorted(PATHS)), st.text(max_size=12) | st.sampled_from(["nan", "inf", "-1", "1e999", "none"]))
def test_any_text_is_read_or_refused_in_three_lines(path, text):
    try:
        config = replace(Config(), {path: text})
    except UserError as error:
        assert 1 <= len(str(error).split("\n")) <= 3  # noqa: PT017
    else:
        assert from_json(Config, to_json(config)) == config


@given(st.text(max_size=12), st.text(max_size=5))
def test_any_name_that_is_no_field_is_refused_in_three_lines(path, text):
    if path not in PATHS:
        refusal(replace, Config(), {path: text})


BROKEN = [
    (lambda v: v.pop("optim"), ["config", "missing: optim"]),
    (lambda v: v["model"].pop("d_model"), ["config.model", "missing: d_model"]),
    (lambda v: v["model"].update(width=3), ["config.model", "unknown: width"]),
    (lambda v: v["optim"]["rotation"].update(x=3), ["config.optim.rotation", "unknown: x"]),
    (lambda v: v["model"].update(d_model="128"), ["config.model.d_model='128'", "an integer"]),
    (lambda v: v["model"].update(d_model=128.0), ["config.model.d_model=128.0", "an integer"]),
    (lambda v: v["model"].update(use_bias=0), ["use_bias=0", "true | false"]),
    (lambda v: v["model"].update(normalizer="softmax2"), ["softmax2"]),
    (lambda v: v["model"].update(d_model=130), ["130", "multiple"]),
    (lambda v: v["data"].update(paths="a"), ["paths"]),
    (lambda v: v["optim"].update(learning_rate=math.nan), ["nan"]),
    (lambda v: v.update(model=[1, 2]), ["config.model"]),
    (lambda v: v.update(model=None), ["config.model"]),
]


def test_a_foreign_or_corrupt_json_is_refused():
    for change, words in BROKEN:
        values = dataclasses.asdict(Config())
        change(values)
        text = "\n".join(refusal(from_json, Config, json.dumps(values)))
        assert all(word in text for word in words), text
    for text in ("", "{", "[]", "3", "null", '"x"', to_json(Config())[:-5], "\x00\x01"):
        refusal(from_json, Config, text)


def test_a_part_of_a_config_is_read_by_itself():
    for remat in (False, True, "dots", "full"):  # older JSON has true or false
        assert from_json(ModelConfig, to_json(ModelConfig(remat=remat))).remat == remat
        assert replace(Config(), {"model.remat": str(remat).lower()}).model.remat == remat
    model = ModelConfig(d_model=64, mlp=("gelu", "relu"), num_layers=2, scan_layers=False)
    assert from_json(ModelConfig, to_json(model)) == model
    assert from_dict(ModelConfig, dataclasses.asdict(model)) == model


def test_the_bases_of_a_run_have_its_seed_unless_they_have_their_own():
    config = replace(Config(), {"train.seed": 7})
    assert config.optim.rotation.seed is None
    assert config.seeded_optim == replace(config.optim, {"rotation.seed": 7})
    for own in ({"optim.rotation.seed": 0}, {"optim.optimizer": "adam"}):  # programs of Adam are those of every seed
        changed = replace(config, own)
        assert changed.seeded_optim is changed.optim


# Small parts.


def test_every_leaf_has_a_path_and_a_value_and_is_frozen():
    assert list(flatten(Config())) == list(PATHS)
    assert PATHS["optim.rotation.kind"] == typing.get_type_hints(RotationConfig)["kind"]
    assert not any(dataclasses.is_dataclass(value) for value in flatten(Config()).values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.d_model = 3


def test_user_error_drops_empty_lines_and_nearest_is_silent_when_nothing_is_near():
    assert str(UserError("a", hint="c")) == "a\nc"
    assert nearest("softmax_1", ["softmax1", "relu"]) == "did you mean 'softmax1'?"
    assert nearest("zzz", ["softmax1", "relu"]) == ""


def test_every_field_is_described_by_the_docstring_of_its_class():
    described = describe_fields(Config)
    assert list(described) == list(PATHS)
    assert all(text.endswith(".") for text in described.values()), described
    assert described["eval.sequences"] == "Number of sequences, spread evenly over the split."
    assert described["model.remat"].endswith("costs little time, `full` keeps nothing.")  # of several lines


def test_names_of_other_programs_mean_fields_and_flags_that_exist():
    flags = set(re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', "".join(p.read_text() for p in COMMANDS)))
    assert flags > {"workdir", "checkpoint"}
    unknown = aliases._OTHER_NAMES.keys() - PATHS.keys() - flags - {"config"}
    assert not unknown
    for ours, others in aliases._OTHER_NAMES.items():
        assert all(ours in aliases.meant(other, [*PATHS, *flags, "config"], most=9) for other in others.split())


def test_a_preset_names_the_field_that_was_meant():
    assert "did you mean 'model.d_model'?" in refusal(lambda: gpt2("60m", n_embd=512))[-1]


def test_every_field_says_what_it_affects():
    numbers, start, computation, nothing = (
        set(fields_affecting(Config, what)) for what in ("numbers", "start", "computation", "nothing")
    )
    assert sorted([*numbers, *start, *computation, *nothing]) == sorted(PATHS)
    assert {"optim.rotation.seed", "optim.rotation.basis", "train.steps", "train.seed", "model.dtype"} < numbers
    assert {"data.seed", "eval.sequences"} < numbers
    assert start == {
        *("model.init_std", "model.embedding_init_std", "model.kernel_init", "model.sink_init", "model.scan_layers"),
        *("train.init_from", "train.allow_normalizer_change"),
    }
    assert computation == {
        *("mesh.data", "mesh.fsdp", "mesh.tensor", "model.remat", "model.attention_implementation"),
        "train.accumulation_steps",
    }
    assert {"train.log_every_steps", "train.keep_every_steps", "data.verify"} < nothing
    assert set(fields_affecting(ModelConfig, "computation", "nothing")) == {"remat", "attention_implementation"}
