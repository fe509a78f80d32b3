"""Tiny random transformers models of the architectures pcdlab must reproduce, for tests only."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as tf

VOCABULARY = 131
SHARED: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]


@cache
def tiny(kind: str) -> Any:
    """A tiny random float32 model; the same weights in every process."""
    no_head_dim = {k: v for k, v in SHARED.items() if k != "head_dim"}
    configs = {
        "llama": lambda: tf.LlamaConfig(**SHARED),
        "qwen2": lambda: tf.Qwen2Config(**no_head_dim),
        "qwen3": lambda: tf.Qwen3Config(**SHARED),
        "gemma2": lambda: tf.Gemma2Config(
            **SHARED,
            sliding_window=7,
            layer_types=WINDOWED,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "gemma3": lambda: tf.Gemma3TextConfig(
            **SHARED, sliding_window=7, layer_types=WINDOWED, query_pre_attn_scalar=8
        ),
        "phi3": lambda: tf.Phi3Config(**no_head_dim),
        "mistral": lambda: tf.MistralConfig(**SHARED, sliding_window=9),
        "gpt_oss": lambda: tf.GptOssConfig(
            **SHARED, sliding_window=7, layer_types=WINDOWED, num_local_experts=2, num_experts_per_tok=1
        ),
        "granite": lambda: tf.GraniteConfig(**no_head_dim, logits_scaling=8.0, attention_multiplier=0.3),
        "cohere": lambda: tf.CohereConfig(**no_head_dim, logit_scale=0.25),
        "gpt2": lambda: tf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
        ),
        # Hybrids: state that cannot skip siblings.
        "lfm2": lambda: tf.Lfm2Config(
            **no_head_dim,
            layer_types=["conv", "full_attention", "conv"],
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
        ),
        "qwen3_next": lambda: tf.Qwen3NextConfig(
            **SHARED,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_experts=0,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    }
    torch.manual_seed(hash_of(kind))
    model = tf.AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.float32)
    # Qwen3-Next runs a chunk and a single token by different formulas, whose float32 results drift apart as weights grow.
    scale = 0.1 if kind == "qwen3_next" else 0.15
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual initialisation is so small that attention hardly matters: a wrong mask would pass unseen.
            if parameter.ndim > 1:
                parameter.normal_(0.0, scale)
    return model.eval()


def hash_of(text: str) -> int:
    """A small number that is the same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % 10_000
