# SPDX-License-Identifier: Apache-2.0
"""Small random models of many families, made from their configurations; nothing is downloaded."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZE = dict(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=8192,
    initializer_range=0.1,
    pad_token_id=0,
    eos_token_id=None,
    bos_token_id=1,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=1024,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=256)
FAMILIES = {
    "llama": {},
    "llama with llama3 scaling": dict(model_type="llama", rope_parameters=LLAMA3),
    "llama with yarn": dict(model_type="llama", rope_parameters=YARN),
    "llama with linear scaling": dict(
        model_type="llama", rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
    ),
    "mistral": dict(sliding_window=None),
    "ministral": dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2),
    "mixtral": dict(num_local_experts=2),
    "qwen2": {},
    "qwen2_moe": dict(
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
    "qwen3": {},
    "qwen3_moe": dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=64),
    "gemma": {},
    "gemma2": dict(sliding_window=64, attn_implementation="eager", query_pre_attn_scalar=32),
    "gemma3_text": dict(
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
    ),
    "granite": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2),
    "starcoder2": {},
    "stablelm": dict(partial_rotary_factor=0.25),
    "phi": dict(partial_rotary_factor=0.5),
    "phi3": {},
    "smollm3": {},
    "gpt_oss": dict(
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=64,
        attn_implementation="eager",
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "seed_oss": {},
    "glm": dict(partial_rotary_factor=0.5),
    "glm4": dict(partial_rotary_factor=0.5),
    "cohere": {},
    "helium": {},
}


def config_of(name):
    options = {**SIZE, "model_type": name, **FAMILIES[name]}
    implementation = options.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    config._attn_implementation = implementation
    return config


def model_of(name="llama", seed=0, **changes):
    config = config_of(name)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model


def prompt(tokens, rows=1, seed=0):
    """Token ids that repeat themselves now and then, as texts do."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 256, (rows, tokens), generator=generator)
    if tokens > 64:
        ids[:, tokens // 2 : tokens // 2 + 24] = ids[:, 4:28]
    return ids
