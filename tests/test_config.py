import dataclasses
import json
import math
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthojax import config as c
from orthojax.config import Config, ModelConfig, OptimConfig, from_json, replace, to_json
from orthojax.errors import UserError

PATHS = c.field_paths(Config)


def refusal(call, *args) -> list[str]:
    """The lines of the error that a call must raise: at most three, none of them empty."""
    with pytest.raises(UserError) as caught:
        call(*args)
    lines = str(caught.value).split("\n")
    assert 1 <= len(lines) <= 3
    assert all(line.strip() and len(line) < 400 for line in lines)
    return lines


OVERRIDES = {"model.num_kv_heads": ("2", 2), "model.position": ("rotary", "rotary"), "model.attention": ("true", True)}
OVERRIDES |= {"optim.learning_rate": ("3e-4", 3e-4), "optim.clip_norm": ("none", None), "train.steps": ("2e3", 2000)}
OVERRIDES |= {"optim.rotation.kind": ("haar", "haar"), "data.tokenizer": ("bytes", "bytes"), "data.seed": (" 12 ", 12)}
OVERRIDES |= {"model.mlp": (" relu ", "relu"), "optim.eps": ("2", 2.0), "mesh.fsdp": ("-1", -1)}
OVERRIDES |= {"data.bos": ("true", True), "model.d_head": ("None", None)}
OVERRIDES |= {"model.gated_attention": ("elementwise", "elementwise")}


def test_one_override_changes_one_field():
    for path, (text, value) in OVERRIDES.items():
        expected = {path: value} if path not in ("model.attention", "model.d_head") else {}
        changes = c.changed_fields(Config(), replace(Config(), {path: text}))
        assert repr(changes) == repr(expected)  # 2.0 is not 2
        assert replace(Config(), {path: value}) == replace(Config(), {path: text})
    assert all(c.describe_type(hint) for hint in PATHS.values())
    assert len(refusal(replace, Config(), {"model.d_model": "nan"})) == 2  # which is no slip for "an" integer
    assert replace(Config(), {"data.tokenizer": "true"}).data.tokenizer == "true"  # a text stays a text
    assert replace(Config(), {}) == Config()
    assert c.changed_fields(Config(), Config()) == {}


def test_fields_that_must_agree_change_together():
    together = {"model.d_model": "6", "model.num_heads": "3"}
    for changes in (together, dict(reversed(together.items()))):
        config = replace(Config(), changes)
        assert (config.model.d_model, config.model.num_heads, config.model.head_dim) == (6, 3, 2)
    refusal(replace, Config(), {"model.d_model": "6"})
    config = replace(Config(), {"data.kind": "text", "data.paths": "a,b"})
    assert config.data.paths == ("a", "b")
    assert replace(config, {"data.kind": "embedded", "data.paths": ""}).data.paths == ()
    per_layer = {"model.num_layers": 2, "model.mlp": "relu, none,", "model.scan_layers": "False"}
    model = replace(Config(), per_layer | {"model.attention": "true,false", "model.gated_attention": "true"}).model
    assert (model.mlp, model.attention, model.gated_attention) == (("relu", "none"), (True, False), True)
    assert replace(Config(), per_layer | {"model.num_layers": 1, "model.mlp": "relu,"}).model.mlp == ("relu",)


BAD_OVERRIDES = [
    # names
    *(("model.d_modle", "3", "'model.d_model'"), ("d_model", "3", "'model.d_model'")),
    *(("optim.rotation.knd", "haar", "'optim.rotation.kind'"), ("Batch-Size", "3", "'train.batch_size'")),
    *(("modle.d_model", "3", "'model.d_model'"), ("model", "gpt2", "'model'"), ("", "3", "''")),
    ("model.a\nb\nc\nd", "1", "model.a"),
    # types
    *(("model.d_model", value, "model.d_model=") for value in ("wide", "1e400", 12.5, True, None, "1\n2\n3\n4")),
    *(("model.d_model", value, "model.d_model=") for value in ("1.5", "", "true")),
    *(("optim.b1", value, "a number") for value in ("fast", "")),
    *((path, "", f"{path}=''") for path in ("model.remat", "model.position")),
    *(("model.attention", "true,maybe", "true | false"), ("model.num_kv_heads", "nothing", "none")),
    *(("model.remat", "1", "true"), ("model.mlp", "RELU", "mlp='RELU'"), ("model.mlp", "relu;gelu", "model.mlp")),
    *(("model.use_bias", 1, "true | false"), ("optim.clip_norm", "big", "none")),
    *(("data.paths", ["a.txt"], "comma-separated"), ("optim.optimizer", "ortoadam", "'orthoadam'")),
    *(("model.position", "rotry", "learned | rotary | none"), ("model.mlp", "swigl", "'swiglu'")),
    # ranges
    *(("model.d_model", value, "model.d_model=") for value in (0, -1)),
    *(("model.d_model", 130, "multiple of 4"), ("model.num_kv_heads", "3", "divisor of 4")),
    *(("model.residual_multiplier", "0", "multiplier=0"), ("model.logits_multiplier", "nan", "nan")),
    *(("model.norm_eps", "0", "norm_eps=0"), ("model.rope_theta", "nan", "nan")),
    *(("optim.learning_rate", value, "learning_rate=") for value in ("0", "nan", "inf")),
    *(("optim.b1", "1", "b1=1"), ("optim.weight_decay", "-0.1", "-0.1"), ("optim.clip_norm", "0", "clip_norm=0")),
    *(("optim.final_learning_rate_fraction", "1.1", "1.1"), ("optim.rotation.seed", "-1", "-1")),
    *(("data.sequence_length", "1", "sequence_length=1"), ("data.seed", str(2**32), str(2**32))),
    *(("train.batch_size", "0", "batch_size=0"), ("train.eval_every_steps", "-1", "-1")),
    *(("eval.sequences", "0", "sequences=0"), ("eval.batch_size", "0", "batch_size=0")),
    # what does not fit together
    *(("model.mlp", "gelu,gelu", "num_layers=4"), ("model.mlp", "gelu,gelu,relu,relu", "scan_layers=false")),
    *(("model.max_length", "32", "max_length=32"), ("data.bos_tokens", "3", "0 | 1 | 2")),
    *(("optim.warmup_steps", "1000", "train.steps=1000"), ("train.steps", "50", "optim.warmup_steps=100")),
    *(("data.kind", "text", "data.paths"), ("data.kind", "tokens", "TRAIN"), ("data.paths", "a.txt", "embedded")),
    *(("data.repeated_share", "1.5", "repeated_share"), ("optim.muon_embeddings", "adam", "optimizer 'muon'")),
    ("model.attention_window", "4,4,none,4", "model.scan_layers=false"),
    *(("model.gated_attention", "head", "true | false, or elementwise"), ("model.attention_window", "0", "window=0")),
    *(("model.rope_local_theta", "100", "a window"), ("model.rotary_layers", "false", "rotary_layers=False")),
    *(("model.rope.factor", "0.5", "factor=0.5"), ("model.mlp", "experts", "model.experts.num_experts")),
    *(("model.rope.scaling", "longrope", "short_factors"), ("model.rope.short_factors", "1,2", "short_factors")),
    *(("train.activation_penalty", "-1", "penalty=-1"), ("train.activation_penalty", "nan", "nan")),
]


ROTARY = {"model.position": "rotary"}
LATENT = ROTARY | {"model.latent.d_rotary": 2}
LONGROPE = {"model.rope.scaling": "longrope", "model.rope.short_factors": (1.0,), "model.rope.long_factors": (1.0,)}
BACKCOPY = {"data.kind": "bigram_backcopy"}
TOGETHER = [
    *((ROTARY | {"model.d_head": 3}, "an even number"), (ROTARY | {"model.rope_local_theta": 9.0}, "and a window")),
    *((LATENT | {"model.num_kv_heads": 2}, "num_kv_heads=2"), (LATENT | {"model.qk_norm": "head"}, "qk_norm='head'")),
    *((LATENT | {"model.rope.fraction": 0.5}, "d_rotary"), (LATENT | {"model.latent.d_rotary": 32}, "1 to 31")),
    *((LONGROPE, "16 of each"), (ROTARY | {"model.rope.scaling": "dynamic", "model.d_head": 2}, "one pair")),
    *(({"model.rope.scaling": "yarn", "model.rope_theta": 1.0}, "above 1"), ({"model.dtype": "float16"}, "loss")),
    ({"model.rope.high_frequency_factor": 0.5}, "above low"),
    *(({"model.experts.groups": 3}, "num_experts=8"), ({"model.experts.groups_per_token": 2}, "all or fewer")),
    *(({"model.experts.gate_shared": True}, "num_shared"), ({"model.experts.per_token": 9}, "up to the 8")),
    ({"train.allow_normalizer_change": True}, "init_from"),
    *((BACKCOPY | {"data.repeated_share": 0.5}, "'embedded'"), ({"train.keep_every_steps": 150}, "multiple")),
    (BACKCOPY | {"data.delimiter": True, "data.sequence_length": 2}, "at least 3"),
]


@pytest.mark.parametrize(
    ("changes", "word"), [*(({path: value}, word) for path, value, word in BAD_OVERRIDES), *TOGETHER]
)
def test_bad_override_is_refused_in_three_lines(changes, word):
    assert word in "\n".join(refusal(replace, Config(), changes))


def test_no_field_takes_a_number_that_no_array_can_hold():
    for path, hint in PATHS.items():
        kinds = c.describe_type(hint)
        wrong = [math.nan, math.inf, -math.inf, 10**310] if "a number" in kinds else []
        wrong += [2**31 + 2**31 * path.endswith("seed"), 10**20] if "an integer" in kinds else []
        for value in [(0, number) if "list" in kinds else number for number in wrong]:
            assert path.rpartition(".")[2] in refusal(replace, Config(), {path: value})[0]
    assert replace(Config(), {"train.seed": 2**32 - 1, "optim.rotation.seed": "4294967295"}).train.seed == 2**32 - 1
    for path, value in {"model.d_model": 2**20 + 4, "model.num_layers": 10**6, "data.sequence_length": 2**25}.items():
        refusal(replace, Config(), {path: value, "model.position": "none"})


def test_orthoadam_on_the_embeddings_of_muon_needs_one_rotation_of_them():
    config = replace(Config(), {"optim.optimizer": "muon", "optim.muon_embeddings": "orthoadam"})
    assert config.optim.has_rotation
    assert not config.optim.is_rotated
    assert config.seeded_optim.rotation.seed == config.train.seed
    for path, value in {"optim.rotated": "true", "optim.rotation.embeddings": "false"}.items():
        assert path in refusal(replace, config, {path: value})[0]


# Configs built in Python are held to the same types as overrides.


def test_config_built_with_a_wrong_value_is_refused():
    for cls, field, value, word in [
        *((ModelConfig, "d_model", "128", "an integer"), (ModelConfig, "mlp", ["gelu"] * 4, "comma-separated")),
        *((OptimConfig, "rotation", "haar", "RotationConfig"), (Config, "model", OptimConfig(), "ModelConfig")),
    ]:
        text = "\n".join(refusal(lambda c=cls, f=field, v=value: c(**{f: v})))
        assert f"{field}=" in text
        assert word in text


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
    changes = c.changed_fields(base, config)
    assert replace(base, changes) == config
    assert set(changes) <= set(PATHS)
    assert all(c.flatten(base)[path] != value for path, value in changes.items())


@given(st.sampled_from(sorted(PATHS)), st.text(max_size=12) | st.sampled_from(["nan", "inf", "-1", "1e999", "none"]))
def test_any_text_read_or_refused_in_three_lines(path, text):
    try:
        config = replace(Config(), {path: text})
    except UserError as error:
        assert 1 <= len(str(error).split("\n")) <= 3  # noqa: PT017
    else:
        assert from_json(Config, to_json(config)) == config


BROKEN = [
    (lambda v: v.pop("optim"), ["config", "missing: optim"]),
    (lambda v: v["model"].update(width=3), ["config.model", "unknown: width"]),
    (lambda v: v["optim"]["rotation"].update(x=3), ["config.optim.rotation", "unknown: x"]),
    (lambda v: v["model"].update(d_model="128"), ["config.model.d_model='128'", "an integer"]),
    (lambda v: v["model"].update(normalizer="softmax2"), ["softmax2"]),
    (lambda v: v["model"].update(d_model=130), ["130", "multiple"]),
    (lambda v: v["optim"].update(learning_rate=math.nan), ["nan"]),
    *((lambda v, model=model: v.update(model=model), ["config.model"]) for model in ([1, 2], None, {})),
]


def test_foreign_or_corrupt_json_is_refused():
    for change, words in BROKEN:
        values = dataclasses.asdict(Config())
        change(values)
        text = "\n".join(refusal(from_json, Config, json.dumps(values)))
        assert all(word in text for word in words), text
    for text in ("", "{", "[]", "3", "null", '"x"', to_json(Config())[:-5], "\x00\x01"):
        refusal(from_json, Config, text)


OF_0_1_0 = (Path(__file__).parent / "config_0_1_0.json").read_text()  # of a run with its defaults
GONE = {"model": {"attention_norm": False, "mlp_norm": [True, False], "gated_norm_rank": 4},
        "optim": {"sink_anneal_steps": 9}}  # fmt: skip


def test_files_of_0_1_0_are_read_unless_they_need_what_is_gone():
    assert from_json(Config, OF_0_1_0) == Config()
    for group, name, value in ((group, *item) for group, fields in GONE.items() for item in fields.items()):
        values = json.loads(OF_0_1_0)
        values[group][name] = value
        problem = refusal(from_json, Config, json.dumps(values))[0]
        assert problem == f"config.{group}.{name}={value!r}: the field was removed after 0.1.0"


def test_a_field_that_a_file_lacks_has_its_default():
    config = replace(Config(), {"model.num_layers": 3, "model.rope.factor": 2.0, "data.bos": True})
    values = dataclasses.asdict(config)
    for group, name in (("model", "normalizer"), ("model", "latent"), ("optim", "rotation"), ("data", "verify")):
        del values[group][name]
    del values["model"]["rope"]["scaling"]
    assert from_json(Config, json.dumps(values)) == config


def test_every_leaf_has_a_path_and_is_frozen():
    assert list(c.flatten(Config())) == list(PATHS)
    assert PATHS["optim.rotation.kind"] == typing.get_type_hints(c.RotationConfig)["kind"]
    assert not any(dataclasses.is_dataclass(value) for value in c.flatten(Config()).values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.d_model = 3


def test_every_field_says_what_it_affects():
    numbers, start, computation, nothing = (
        set(c.fields_affecting(Config, what)) for what in ("numbers", "start", "computation", "nothing")
    )
    assert sorted([*numbers, *start, *computation, *nothing]) == sorted(PATHS)
    assert {"optim.rotation.seed", "train.steps", "train.seed", "model.dtype", "data.seed", "eval.sequences"} < numbers
    assert {"model.init_std", "model.scan_layers", "train.init_from"} <= start
    assert {"mesh.data", "model.remat", "train.accumulation_steps", "train.logits_dtype"} < computation
    assert {"train.log_every_steps", "train.keep_checkpoints"} < nothing
    assert "remat" in c.fields_affecting(ModelConfig, "computation", "nothing")


def test_optional_groups_take_overrides_and_are_taken_back():
    config = replace(Config(), {"model.rope.scaling": "linear", "model.rope.factor": "2", "model.latent.d_rotary": 8})
    assert config.model.rope == c.RopeConfig(scaling="linear", factor=2.0)
    assert replace(config, dict.fromkeys(c.changed_fields(Config(), config))) == Config()


def test_rotation_has_seed_of_run_or_its_own():
    config = replace(Config(), {"train.seed": 7})
    assert config.optim.rotation.seed is None
    assert config.seeded_optim == replace(config.optim, {"rotation.seed": 7})
    for own in ({"optim.rotation.seed": 0}, {"optim.optimizer": "adam"}):  # programs of Adam are those of every seed
        changed = replace(config, own)
        assert changed.seeded_optim is changed.optim


def test_every_field_is_described_by_its_class():
    described = c.describe_fields(Config)
    assert list(described) == list(PATHS)
    assert all(text.endswith(".") for text in described.values()), described
    assert "\n" not in "".join(described.values())
