"""A model that orthojax trained, in PyTorch: `AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)`.

Eager attention with softmax-1, learned sinks and other normalizers, gates and norms of one scale; it needs torch and
transformers only. Letters: B batch, T queries, S keys, N heads, H head width, D model width.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# The name of the cache in outputs; versions of transformers differ.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
ACTIVATIONS = {
    "gelu": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "gelu_exact": F.gelu,
    "relu": F.relu,
    "swiglu": lambda hidden, gate: F.silu(gate) * hidden,
    "geglu": lambda hidden, gate: F.gelu(gate, approximate="tanh") * hidden,
    "linear": lambda x: x,  # no hidden units
}


def at(value, layer):
    """Returns the value of one layer, of a value for all or a list."""
    return value[layer] if isinstance(value, list) else value


class OrthojaxConfig(PretrainedConfig):
    """`model` has the fields of orthojax.ModelConfig; `scales`, by layer or for all, what rotary positions need.

    That is `frequencies` (None without such positions) and the factors on `rotated` channels and on `products` q k.
    """

    model_type = "orthojax"

    def __init__(self, model=None, scales=None, **kwargs):
        self.model, self.scales, c = model or {}, scales or {}, model or {}
        self.vocab_size, self.hidden_size = c.get("vocab_size"), c.get("d_model")
        self.max_position_embeddings = c.get("max_length")
        self.num_hidden_layers, self.num_attention_heads = c.get("num_layers"), c.get("num_heads")
        super().__init__(**kwargs)
        self.tie_word_embeddings = c.get("tie_embeddings", False)


class Norm(nn.Module):
    """Normalisation over the last axis, in float32."""

    def __init__(self, c, width):
        super().__init__()
        self.kind, self.eps = c["norm"], c["norm_eps"]
        shape = {"layernorm": (width,), "rmsnorm": (width,), "rmsnorm_single": ()}.get(self.kind)
        has_bias = self.kind == "layernorm" and c["use_bias"] in (True, "norm")
        self.weight = None if shape is None else nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None

    def forward(self, x):
        if self.kind == "none":
            return x
        y = x.float()
        y = y - y.mean(-1, keepdim=True) if self.kind.startswith("layernorm") else y
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        y = y if self.weight is None else y * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def rotate(x, positions, frequencies, scale):
    """Rotates the channel pairs (i, i + R/2) of x [B, T, N, H] at positions [B, T], by R/2 frequencies."""
    angles = positions[:, :, None, None] * torch.tensor(frequencies, device=x.device)
    cos, sin = scale * angles.cos(), scale * angles.sin()
    turned, rest = x.split([2 * len(frequencies), x.shape[-1] - 2 * len(frequencies)], -1)
    first, second = turned.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def normalize(name, x, visible, sink):
    """Maps logits [B, N, T, S] to weights: exp(x) / (exp(sink) + sum exp(x)), or as the name says."""
    if name == "softpick":
        x = x.masked_fill(~visible, 0.0)
        shift = x.amax(-1, keepdim=True).clamp(min=0.0)
        size = -torch.exp(x.clamp(min=0.0) - shift) * torch.expm1(-x.abs())
        return size * (x > 0) / (size.sum(-1, keepdim=True) + 1e-8 * torch.exp(-shift))
    if name in ("relu", "gelu", "sigmoid"):
        count = 1 if name == "sigmoid" else visible.sum(-1, keepdim=True).clamp(min=1)
        return (getattr(torch if name == "sigmoid" else F, name)(x) / count).masked_fill(~visible, 0.0)
    x = x.masked_fill(~visible, torch.finfo(x.dtype).min)
    sink = torch.as_tensor(sink, dtype=x.dtype, device=x.device).reshape(-1, 1, 1)
    return torch.cat([x, sink.expand(*x.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


class Attention(nn.Module):
    """The attention of one layer; `slot` is its place in a cache."""

    def __init__(self, config, layer, slot):
        super().__init__()
        c = self.c = config.model
        self.slot, self.scales, D, N = slot, at(config.scales, layer), c["d_model"], c["num_heads"]
        H, kv_heads = c["d_head"] or D // N, c["num_kv_heads"] or N
        bias, sizes = c["use_bias"] in (True, "qkv", "attention"), {"query": N, "key": kv_heads, "value": kv_heads}
        for part, heads in sizes.items():
            setattr(self, part, nn.Linear(D, heads * H, bias))
            if part != "value" and c["qk_norm"] != "none":
                setattr(self, f"{part}_norm", Norm(c, H if c["qk_norm"] == "head" else heads * H))
        self.output = nn.Linear(N * H, D, c["use_bias"] in (True, "attention"))
        if c["gated_attention"]:
            self.gate = nn.Linear(D, N * H if c["gated_attention"] == "elementwise" else N, c["use_bias"] is True)
        if c["normalizer"] == "learned_sink":
            self.sink = nn.Parameter(torch.zeros(N))
        else:
            n = {"softmax1": 1.0, "softmax_n": c["normalizer_n"]}.get(c["normalizer"], 0.0)
            self.sink = math.log(n) if n else -math.inf

    def heads(self, x, part, positions):
        """Returns queries, keys or values [B, T, heads, H], normed and rotated."""
        c, norm, y = self.c, getattr(self, f"{part}_norm", nn.Identity()), getattr(self, part)(x)
        y = norm(y) if c["qk_norm"] == "all" else y
        y = y.unflatten(-1, (-1, c["d_head"] or c["d_model"] // c["num_heads"]))
        y = norm(y) if c["qk_norm"] == "head" else y
        turns = self.scales["frequencies"] and part != "value"
        return rotate(y, positions, self.scales["frequencies"], self.scales["rotated"]) if turns else y

    def forward(self, x, positions, visible, cache):
        c = self.c
        query, key, value = (self.heads(x, part, positions).transpose(1, 2) for part in ("query", "key", "value"))
        if cache is not None:
            key, value = cache.update(key, value, self.slot)
        key, value = (a.repeat_interleave(c["num_heads"] // a.shape[1], 1) for a in (key, value))
        logits, cap = self.scales["products"] * (query @ key.transpose(-1, -2)).float(), c["attention_soft_cap"]
        logits = cap * torch.tanh(logits / cap) if cap else logits
        weights = normalize(c["normalizer"], logits, visible, self.sink)
        y = (weights.to(value.dtype) @ value).transpose(1, 2)
        if c["gated_attention"]:
            y = y * torch.sigmoid(self.gate(x)).unflatten(-1, (c["num_heads"], -1))
        return self.output(y.flatten(-2)), weights


class Feedforward(nn.Module):
    """The MLP of one layer."""

    def __init__(self, c, kind):
        super().__init__()
        self.kind, D, bias = kind, c["d_model"], c["use_bias"] is True
        self.parts = {"linear": (), "swiglu": ("input", "gate"), "geglu": ("input", "gate")}.get(kind, ("input",))
        for part in self.parts:
            setattr(self, part, nn.Linear(D, c["d_mlp"], bias))
        self.output = nn.Linear(c["d_mlp"] if self.parts else D, D, bias)

    def forward(self, x):
        hidden = [getattr(self, part)(x) for part in self.parts] or [x]
        return self.output(ACTIVATIONS[self.kind](*hidden))


class Block(nn.Module):
    """One layer: attention and MLP, each with its norms, added to the residual stream."""

    def __init__(self, config, layer, slot):
        super().__init__()
        c, kind = config.model, at(config.model["mlp"], layer)
        self.placement, self.window = c["block"], at(c["attention_window"], layer)
        self.multiplier = c["residual_multiplier"]
        self.attention = Attention(config, layer, slot) if at(c["attention"], layer) else None
        self.mlp = None if kind == "none" else Feedforward(c, kind)
        for part in (part for part in ("attention", "mlp") if getattr(self, part) is not None):
            for name in ("norm", "output_norm") if c["block"] == "sandwich_norm" else ("norm",):
                setattr(self, f"{self.normed(part)}_{name}", Norm(c, c["d_model"]))

    def normed(self, part):
        return "attention" if self.placement == "parallel_one_norm" else part

    def read(self, x, part):
        part = self.normed(part)
        return x if self.placement == "output_norm" else getattr(self, f"{part}_norm")(x)

    def written(self, y, part):
        name = {"output_norm": f"{part}_norm", "sandwich_norm": f"{part}_output_norm"}.get(self.placement)
        return self.multiplier * (y if name is None else getattr(self, name)(y))

    def forward(self, x, *given):
        before, weights = x, None
        if self.attention is not None:
            y, weights = self.attention(self.read(x, "attention"), *given)
            x = x + self.written(y, "attention")
        if self.mlp is not None:
            read = self.read(before if self.placement.startswith("parallel") else x, "mlp")
            x = x + self.written(self.mlp(read), "mlp")
        return x, weights


class OrthojaxForCausalLM(PreTrainedModel, GenerationMixin):
    """The model, for generate, training and measurement of hidden states and attention weights."""

    config_class = OrthojaxConfig
    _no_split_modules = ("Block",)

    def __init__(self, config):
        super().__init__(config)
        c, layers = config.model, range(config.model["num_layers"])
        attends = [at(c["attention"], layer) for layer in layers]
        self.token_embedding = nn.Embedding(c["vocab_size"], c["d_model"])
        if c["position"] == "learned":
            self.position_embedding = nn.Embedding(c["max_length"], c["d_model"])
        self.layers = nn.ModuleList(Block(config, layer, sum(attends[:layer])) for layer in layers)
        self.final_norm = Norm(c, c["d_model"])
        self.head = None if c["tie_embeddings"] else nn.Linear(c["d_model"], c["vocab_size"], bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.token_embedding

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                labels=None, use_cache=None, output_attentions=None, output_hidden_states=None, logits_to_keep=0,
                cache=None, **kwargs):  # fmt: skip
        """Computes logits [B, T, V]; `attention_mask` [B, S], 0 for padding, is of cached and new tokens."""
        c, cache = self.config.model, past_key_values if cache is None else cache
        cache = DynamicCache() if cache is None and use_cache else cache
        x = self.token_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        (B, T, D), seen = x.shape, 0 if cache is None else cache.get_seq_length()
        mask = x.new_ones(B, seen + T) if attention_mask is None else attention_mask
        keys = mask.long().cumsum(-1) - 1  # their positions
        positions = keys[:, -T:].clamp(min=0) if position_ids is None else position_ids.expand(B, T)
        x = c["embedding_multiplier"] * (x * math.sqrt(D) if c["scale_embeddings"] else x)
        if c["position"] == "learned":
            if mask.shape[1] > c["max_length"]:
                raise ValueError(f"{mask.shape[1]} tokens are more than the model's max_length={c['max_length']}")
            x = x + self.position_embedding(positions)
        states, attentions = [], []
        for layer in self.layers:
            states.append(x)
            x, weights = layer(x, positions, self.visible(keys, mask, T, layer.window), cache)
            attentions.append(weights)
        x = self.final_norm(x)
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = c["logits_multiplier"] * F.linear(x[:, last], (self.head or self.token_embedding).weight)
        logits = c["final_soft_cap"] * torch.tanh(logits / c["final_soft_cap"]) if c["final_soft_cap"] else logits
        loss = None if labels is None else self.loss_function(logits, labels, c["vocab_size"], **kwargs)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_weights = self.config.output_attentions if output_attentions is None else output_attentions
        seen = {CACHE: cache, "hidden_states": (*states, x) if wants_states else None}
        seen["attentions"] = tuple(attentions) if wants_weights else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, **seen)

    def visible(self, keys, mask, T, window):
        """Returns the mask [B, 1, T, S] of the keys that each query sees; the first tokens may see each other."""
        t, s, relaxed = keys[:, -T:, None], keys[:, None], self.config.model["relaxed_causal_tokens"]
        visible = (s <= t) | ((s < relaxed) & (t < relaxed))
        visible = visible if window is None else visible & (t - s < window)
        return (visible & mask[:, None].bool())[:, None]
