"""Parameter trees of well-known JAX code bases: paths and shapes, as data for tests.

A rule that finds d_model (the width of the residual stream) from names and shapes alone must give the width in
DECIDED and must refuse the trees of REFUSED. Names and shapes are facts from the public code of each project: nanodo,
Flax (gemma, nnx.LoRALinear), dm-haiku, Equinox, Simply, jax-llm-examples, Levanter, MaxText, Praxis, Qwix and Hugging
Face Transformers (the Flax models). Paths are what jax.tree_util.keystr(path, simple=True, separator="/") gives. Sizes
are the project's own, or others its configuration allows that keep d_model, d_ff and heads * head_dim apart; two layers
where each layer has its own arrays (three in deepseek_r1).
"""

import itertools
import re


def tree(text):
    """{path: shape} of entries path:64x256; {a,b} stands for several paths; stem/ goes in front of all that follow."""
    shapes, stem = {}, ""
    for entry in text.split():
        if entry.endswith("/"):
            stem = entry
            continue
        path, _, dims = entry.partition(":")
        pieces = re.split("[{}]", stem + path)
        options = [piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces)]
        for choice in itertools.product(*options):
            shapes["".join(choice)] = tuple(int(n) for n in dims.split("x") if n)
    return shapes


# (name, d_model): entries
_DECIDED = {
    # Linen, one module per layer; tied table; the position table is square (default context length 512)
    ("nanodo", 512): """
    embed/embedding:32101x512 out_ln/scale:512 pos_embed/embedding:512x512
    blocks_{0,1}/ CausalAttn_0/attn_out_proj/kernel:8x64x512 CausalAttn_0/{key,query,value}/kernel:512x8x64
    LayerNorm_{0,1}/scale:512 Mlp_0/Dense_0/kernel:512x2048 Mlp_0/Dense_1/kernel:2048x512""",
    # nnx.State, without the .value of each variable; kv is [2, kv heads, d, head_dim], norms of width head_dim
    ("flax gemma3 1b", 1152): """
    embedder/embedding:262144x1152 final_norm/scale:1152
    layers/{0,1}/ attn/_{key,query}_norm/scale:256 attn/attn_vec_einsum/kernel:4x256x1152
    attn/kv_einsum/kernel:2x1x1152x256 attn/q_einsum/kernel:4x1152x256
    mlp/down_proj/kernel:6912x1152 mlp/{gate,up}_proj/kernel:1152x6912
    {post_attention,post_ffw,pre_attention,pre_ffw}_norm/scale:1152""",
    # biases are b, matrices w; vocabulary == d (the default); positions are a bare parameter
    ("dm-haiku transformer", 128): """
    language_model/ positional_embeddings:64x128 embed/embeddings:128x128 linear/b:128 linear/w:128x128 transformer/
    layer_norm{,_1,_2,_3,_4}/{offset,scale}:128 linear{,_2}/b:512 linear{,_2}/w:128x512 linear_{1,3}/b:128
    linear_{1,3}/w:512x128 transformer/multi_head_attention{,_1}/ {key,query,value}/b:256
    {key,query,value}/w:128x256 linear/b:128 linear/w:256x128""",
    # weight is [out, in], norm scales are weight too; mlp and output are one Linear each; three tables
    ("equinox bert", 128): """
    encoder/pooler/weight:128x128 encoder/pooler/bias:128 classifier_head/weight:2x128 classifier_head/bias:2
    encoder/embedder_block/ token_embedder/weight:30522x128 segment_embedder/weight:2x128
    position_embedder/weight:512x128 layernorm/{weight,bias}:128
    encoder/layers/{0,1}/ attention_block/attention/{query,key,value,output}_proj/weight:128x128
    attention_block/attention/{query,key,value,output}_proj/bias:128 attention_block/layernorm/{weight,bias}:128
    ff_block/mlp/weight:512x128 ff_block/mlp/bias:512 ff_block/output/weight:128x512
    ff_block/{output,layernorm}/bias:128 ff_block/layernorm/weight:128""",
    # AnnotatedArray adds /0; o_proj is [d, heads, head_dim] as q_proj is; the table is embed_linear/w
    ("simply 986m", 1536): """
    embed_linear/b/0:100864 embed_linear/w/0:100864x1536 final_ln/scale/0:1536
    block_{0,1}/ attn/{k,o,q,v}_proj/w/0:1536x8x256 attn/per_dim_scale/scale/0:256 ffn/ffn_0{,_gate}/w/0:1536x12288
    ffn/ffn_1/w/0:12288x1536 {post_ln_0,post_ln_1,pre_ln_0,pre_ln_1}/scale/0:1536""",
    # experts lead; d_ff == d (the default), gate and up fused; biases of 2 dimensions; sinks
    ("jax-llm-examples gpt_oss", 2880): """
    embedding:201088x2880 gamma_final:2880 lm_head:2880x201088
    layers/{0,1}/ ffw/w_router:2880x32 ffw/w_router_bias:32 ffw/we_gate_up:32x2880x5760 ffw/we_gate_up_bias:32x5760
    ffw/we_down:32x2880x2880 ffw/we_down_bias:32x2880 attn/q:2880x64x64 attn/q_bias:64x64 attn/{k,v}:2880x8x64
    attn/{k,v}_bias:8x64 attn/o:64x64x2880 attn/o_bias:2880 attn/sinks:64 attn_{pre,post}_gamma:2880""",
    # MLA: ranks 1536 and 512, matrices called q_b, k_b, v_b; one dense layer and two of experts
    ("jax-llm-examples deepseek_r1", 7168): """
    layers/0/mlp/w_{gate,up}:7168x18432 layers/0/mlp/w_down:18432x7168 layers/{0,1,2}/gamma_{pre,post}_attn:7168
    embedding:129280x7168 gamma_final:7168 lm_head:7168x129280 layers/{0,1,2}/attn/ q_a:7168x1536 q_gamma:1536
    q_b:1536x128x192 kv_a:7168x512 k_pe:7168x64 kv_gamma:512 {k,v}_b:512x128x128 o:128x128x7168 layers/{1,2}/mlp/
    w_router:7168x256 b_router:256 we_{gate,up}:256x7168x2048 we_down:256x2048x7168 ws_{gate,up}:7168x2048
    ws_down:2048x7168""",
    # NamedArray adds /0; 4 layers in front, then [out, in]: q is [L, kv heads, group, head_dim, d]
    ("levanter llama", 2048): """
    transformer/norm/weight/0:2048 embeddings/token_embeddings/weight/0:32000x2048 lm_head/weight/0:32000x2048
    transformer/layers/stacked/ self_attn/q_proj/weight/0:4x8x3x64x2048 self_attn/{k,v}_proj/weight/0:4x8x64x2048
    self_attn/o_proj/weight/0:4x2048x24x64 mlp/{gate,up}_proj/weight/0:4x8192x2048
    mlp/down_proj/weight/0:4x2048x8192 {input,post_attention}_layernorm/weight/0:4x2048""",
    # scan axis 1 (16 layers): kernels [d, L, f], scales [d, L], out [heads, L, head_dim, d]
    ("maxtext llama", 2048): """
    token_embedder/embedding:32000x2048 decoder/decoder_norm/scale:2048 decoder/logits_dense/kernel:2048x32000
    decoder/layers/ {pre,post}_self_attention_layer_norm/scale:2048x16 self_attention/query/kernel:2048x16x8x128
    self_attention/{key,value}/kernel:2048x16x4x128 self_attention/out/kernel:8x16x128x2048
    mlp/wi_{0,1}/kernel:2048x16x7168 mlp/wo/kernel:7168x16x2048""",
    # Linen, but kernels are [out, in] (Conv1D)
    ("huggingface FlaxGPT2", 768): """
    transformer/ ln_f/{bias,scale}:768 wpe/embedding:1024x768 wte/embedding:50257x768 transformer/h/{0,1}/
    attn/c_attn/bias:2304 attn/c_attn/kernel:2304x768 {attn,mlp}/c_proj/bias:768 attn/c_proj/kernel:768x768
    ln_{1,2}/{bias,scale}:768 mlp/c_fc/bias:3072 mlp/c_fc/kernel:3072x768 mlp/c_proj/kernel:768x3072""",
    # encoder and decoder; a relative_attention_bias/embedding [32, heads]; norm scales are weight
    ("huggingface FlaxT5 v1.1 small", 512): """
    lm_head/kernel:512x32128 shared/embedding:32128x512 encoder/block/{0,1}/layer/ {0,1}/layer_norm/weight:512
    1/DenseReluDense/wi_{0,1}/kernel:512x1024 1/DenseReluDense/wo/kernel:1024x512 {decoder,encoder}/
    block/{0,1}/layer/0/SelfAttention/{k,q,v}/kernel:512x384 block/{0,1}/layer/0/SelfAttention/o/kernel:384x512
    block/0/layer/0/SelfAttention/relative_attention_bias/embedding:32x6 final_layer_norm/weight:512
    decoder/block/{0,1}/layer/ {0,1,2}/layer_norm/weight:512 1/EncDecAttention/{k,q,v}/kernel:512x384
    1/EncDecAttention/o/kernel:384x512 2/DenseReluDense/wi_{0,1}/kernel:512x1024 2/DenseReluDense/wo/kernel:1024x512""",
    # table width 512 with project_in and project_out; the position table has width d_model
    ("huggingface FlaxOPT 350m", 1024): """
    model/decoder/ embed_positions/embedding:2050x1024 embed_tokens/embedding:50272x512 project_in/kernel:512x1024
    project_out/kernel:1024x512 model/decoder/layers/{0,1}/ fc1/bias:4096 fc1/kernel:1024x4096
    {fc2,final_layer_norm,self_attn_layer_norm}/bias:1024 fc2/kernel:4096x1024
    {final,self_attn}_layer_norm/scale:1024 self_attn/{k,out,q,v}_proj/bias:1024
    self_attn/{k,out,q,v}_proj/kernel:1024x1024""",
    # nanodo with its table transposed, which is made up
    ("table [d, vocab]", 512): """
    embed/embedding:512x32101 out_ln/scale:512 pos_embed/embedding:1024x512
    blocks_{0,1}/ CausalAttn_0/attn_out_proj/kernel:8x64x512 CausalAttn_0/{key,query,value}/kernel:512x8x64
    LayerNorm_{0,1}/scale:512 Mlp_0/Dense_0/kernel:512x2048 Mlp_0/Dense_1/kernel:2048x512""",
    # patches; the only table is position_embeddings [1, 197, d]
    ("huggingface FlaxViT", 768): """
    embeddings/cls_token:1x1x768 embeddings/position_embeddings:1x197x768 layernorm/{bias,scale}:768
    pooler/dense/bias:768 pooler/dense/kernel:768x768 embeddings/patch_embeddings/projection/ bias:768
    kernel:16x16x3x768 encoder/layer/{0,1}/ attention/attention/{key,query,value}/bias:768
    attention/attention/{key,query,value}/kernel:768x768 attention/output/dense/bias:768
    attention/output/dense/kernel:768x768 intermediate/dense/bias:3072 intermediate/dense/kernel:768x3072
    layernorm_{after,before}/{bias,scale}:768 output/dense/bias:768 output/dense/kernel:3072x768""",
}

_REFUSED = {
    # text 512 and vision 768, 12 layers each (2 here)
    "huggingface FlaxCLIP ViT-B/32": """
    logit_scale: text_model/embeddings/position_embedding/embedding:77x512
    text_model/embeddings/token_embedding/embedding:49408x512 text_model/final_layer_norm/{bias,scale}:512
    text_projection/kernel:512x512 vision_model/{post_layernorm,pre_layrnorm}/{bias,scale}:768
    visual_projection/kernel:768x512 text_model/encoder/layers/{0,1}/ layer_norm{1,2}/{bias,scale}:512
    mlp/fc1/bias:2048 mlp/fc1/kernel:512x2048 mlp/fc2/bias:512 mlp/fc2/kernel:2048x512
    self_attn/{k,out,q,v}_proj/bias:512 self_attn/{k,out,q,v}_proj/kernel:512x512 vision_model/embeddings/
    class_embedding:768 patch_embedding/kernel:32x32x3x768 position_embedding/embedding:50x768
    vision_model/encoder/layers/{0,1}/ layer_norm{1,2}/{bias,scale}:768 mlp/fc1/bias:3072 mlp/fc1/kernel:768x3072
    mlp/fc2/bias:768 mlp/fc2/kernel:3072x768 self_attn/{k,out,q,v}_proj/bias:768
    self_attn/{k,out,q,v}_proj/kernel:768x768""",
    # table width 128 and d 768; one shared layer
    "huggingface FlaxAlbert": """
    pooler/bias:768 pooler/kernel:768x768 embeddings/ LayerNorm/{bias,scale}:128
    position_embeddings/embedding:512x128 token_type_embeddings/embedding:2x128 word_embeddings/embedding:30000x128
    encoder/albert_layer_groups/0/albert_layers/0/ attention/LayerNorm/{bias,scale}:768
    attention/{dense,key,query,value}/bias:768 attention/{dense,key,query,value}/kernel:768x768 ffn/bias:3072
    ffn/kernel:768x3072 {ffn_output,full_layer_layer_norm}/bias:768 ffn_output/kernel:3072x768
    full_layer_layer_norm/scale:768 encoder/embedding_hidden_mapping_in/ bias:768 kernel:128x768""",
    # adapters on the Linear layers of gemma3 1b (nnx.LoRALinear), rank 8
    "flax nnx LoRA": """
    layers/{0,1}/mlp/ {gate,up}_proj/lora/lora_a:1152x8 {gate,up}_proj/lora/lora_b:8x6912
    down_proj/lora/lora_a:6912x8 down_proj/lora/lora_b:8x1152""",
    # adapters on all of nanodo (suffix on the name, also on the table), rank 8
    "qwix LoRA": """
    embed/embedding_lora_a:512x8 embed/embedding_lora_b:8x32101
    blocks_{0,1}/ CausalAttn_0/{attn_out_proj,key,query,value}/kernel_lora_a:512x8
    CausalAttn_0/{attn_out_proj,key,query,value}/kernel_lora_b:8x512 Mlp_0/Dense_0/kernel_lora_a:512x8
    Mlp_0/Dense_0/kernel_lora_b:8x2048 Mlp_0/Dense_1/kernel_lora_a:2048x8 Mlp_0/Dense_1/kernel_lora_b:8x512""",
    # no name says that the tied table, softmax/logits_ffn/linear/w [d, vocab], is one
    "praxis": """
    lm/softmax/logits_ffn/linear/w:1024x32000 lm/softmax/logits_ffn/bias/b:32000 lm/final_ln/{scale,bias}:1024
    lm/transformer/repeat/sub/x_layers_0/ layer_norm/{scale,bias}:12x1024 ff_layer/layer_norm/{scale,bias}:12x1024
    self_attention/{query,key,value,post}/w:12x1024x8x64 self_attention/{query,key,value}/b:12x8x64
    self_attention/post/b:12x1024 self_attention/per_dim_scale/per_dim_scale:12x64
    ff_layer/ffn_layer1/linear/w:12x1024x4096 ff_layer/ffn_layer1/bias/b:12x4096
    ff_layer/ffn_layer2/linear/w:12x4096x1024 ff_layer/ffn_layer2/bias/b:12x1024""",
    # an MLP
    "dm-haiku mnist": """
    linear/w:784x300 linear/b:300 linear_1/w:300x100 linear_1/b:100 linear_2/w:100x10 linear_2/b:10""",
    # two small MLPs and a Linear called obs_embed (made up)
    "actor and critic": """
    obs_embed/kernel:17x64 obs_embed/bias:64 actor/Dense_2/kernel:64x6 actor/Dense_2/bias:6
    critic/Dense_2/kernel:64x1 critic/Dense_2/bias:1 {actor,critic}/Dense_{0,1}/ kernel:64x64 bias:64""",
}

DECIDED = {name: (d_model, tree(text)) for (name, d_model), text in _DECIDED.items()}
REFUSED = {name: tree(text) for name, text in _REFUSED.items()}
