"""Which config field or flag a name means that users bring from elsewhere, or mistype."""

import difflib
from collections.abc import Iterable

# Ours -> the names of nanoGPT, the Hugging Face Trainer and its model configs, optax, and what else is often typed.
_OTHER_NAMES = {
    "model.vocab_size": "vocab n_vocab",
    "data.sequence_length": "block_size seq_len seq_length max_seq_len max_seq_length context_length ctx_len n_ctx",
    "model.max_length": "max_position_embeddings n_positions max_len block_size",
    "model.d_model": "n_embd hidden_size hidden_dim d_embd dim embed_dim emb_dim width model_dim",
    "model.num_layers": "n_layer n_layers num_hidden_layers layers depth n_blocks",
    "model.num_heads": "n_head n_heads num_attention_heads heads",
    "model.num_kv_heads": "num_key_value_heads n_kv_head n_kv_heads kv_heads",
    "model.d_head": "head_dim head_size",
    "model.d_value": "v_head_dim",
    "model.d_latent": "kv_lora_rank",
    "model.d_query_latent": "q_lora_rank",
    "model.num_experts": "n_routed_experts num_local_experts n_experts",
    "model.experts_per_token": "num_experts_per_tok top_k_experts moe_top_k",
    "model.num_shared_experts": "n_shared_experts",
    "model.d_expert": "moe_intermediate_size",
    "model.expert_scale": "routed_scaling_factor",
    "model.d_mlp": "n_inner intermediate_size d_ff ffn_dim mlp_dim ff_dim",
    "model.position": "position_embedding_type pos_emb positional_encoding rope",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "model.use_bias": "bias attention_bias mlp_bias",
    "model.mlp": "activation hidden_act activation_function act_fn",
    "model.normalizer": "softmax attention_normalizer",
    "model.attention_implementation": "attn_implementation flash flash_attention",
    "model.tie_embeddings": "tie_word_embeddings weight_tying",
    "model.init_std": "initializer_range",
    "model.remat": "gradient_checkpointing checkpoint_activations",
    "model.dtype": "precision bf16 fp16 torch_dtype compute_dtype",
    "optim.optimizer": "opt optim",
    "optim.learning_rate": "lr max_lr peak_lr peak_value init_value learningrate",
    "optim.warmup_steps": "warmup warmup_iters warmup_ratio num_warmup_steps lr_warmup",
    "optim.final_learning_rate_fraction": "min_lr end_value decay_lr lr_scheduler_type final_lr alpha",
    "optim.b1": "beta1 adam_beta1",
    "optim.b2": "beta2 adam_beta2",
    "optim.eps": "adam_epsilon epsilon adam_eps",
    "optim.weight_decay": "wd",
    "optim.clip_norm": "grad_clip max_grad_norm gradient_clip clip max_norm",
    "data.paths": "data dataset data_dir data_path train_file text",
    "data.tokenizer": "tokenizer_name",
    "train.steps": "max_iters max_steps iters iterations num_steps n_steps total_steps train_steps num_iterations "
    "lr_decay_iters decay_steps epochs num_epochs num_train_epochs",
    "train.batch_size": "batch_size per_device_train_batch_size train_batch_size bs batch",
    "eval.batch_size": "per_device_eval_batch_size eval_batch_size",
    "train.accumulation_steps": "gradient_accumulation_steps grad_accum grad_accum_steps accum_steps",
    "train.seed": "seed random_seed",
    "train.init_from": "model_name_or_path pretrained finetune",
    "train.log_every_steps": "log_interval logging_steps log_every log_freq",
    "train.eval_every_steps": "eval_interval eval_steps eval_every val_every",
    "train.checkpoint_every_steps": "save_steps save_every save_interval checkpoint_every always_save_checkpoint",
    "train.keep_checkpoints": "save_total_limit max_to_keep",
    "train.tensorboard": "report_to",
    "train.wandb": "wandb_log",
    "eval.sequences": "eval_iters eval_size",
    "mesh.data": "devices gpus num_devices n_gpus dp",
    "mesh.tensor": "tp",
    "config": "config_file cfg",
    "workdir": "out_dir output_dir logdir log_dir save_dir out resume resume_from_checkpoint run_dir",
    "output": "out_dir output_dir out workdir",
    "checkpoint": "ckpt model model_path path run",
    "model": "checkpoint ckpt model_path model_name_or_path path run",
    "input": "data dataset text files path",
    "multihost": "distributed ddp",
}

# What there is no field for.
_NOT_A_FIELD = {
    **dict.fromkeys(
        ("dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout"), "models have no dropout"
    ),
    **dict.fromkeys(("device", "backend", "accelerator"), "JAX chooses the device; JAX_PLATFORMS=cpu overrides it"),
    "compile": "every program is compiled",
}


def meant(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Which of the known dotted names a name may mean, the likeliest first; [] where none is near.

    Those that other programs call so and those whose last part it is come first, and without them those of near
    spelling.

    >>> meant("optim.lr", ["optim.b1", "optim.learning_rate"]), meant("leraning_rate", ["optim.learning_rate"])
    (['optim.learning_rate'], ['optim.learning_rate'])
    """
    known, group, word = set(known), name.rpartition(".")[0], _word(name)
    names: dict[str, list[str]] = {}
    for ours, others in _OTHER_NAMES.items():
        for other in others.split() if ours in known else ():
            names.setdefault(other, []).append(ours)
    for ours in sorted(known):
        names.setdefault(ours.rpartition(".")[2], []).append(ours)
    words = [word] if word in names else difflib.get_close_matches(word, names, n=most, cutoff=0.7)
    found = dict.fromkeys(ours for word in words for ours in names[word])
    return sorted(found, key=lambda ours: not group or ours.rpartition(".")[0] != group)[:most]


def not_a_field(name: str) -> str:
    """What to know about a setting of other programs that there is no field for; '' for any other name."""
    return _NOT_A_FIELD.get(_word(name), "")


def _word(name: str) -> str:
    return name.replace("-", "_").lower().rpartition(".")[2]
