"""A tiny random model that every backend runs: the same weights as a GGUF file and as a transformers folder.

Knows the tensors of one architecture (Llama) in GGUF. Knows no framework: what it writes, :func:`pcdlab.models.load` opens.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel

from pcdlab.convert import convert

__all__ = ["write_tiny"]

LAYERS, WIDTH, INNER, HEADS, KEY_HEADS, POSITIONS = 3, 32, 48, 4, 2, 512
SPREAD = 0.2  # the usual initialisation is so small that attention hardly matters: a wrong mask would pass unseen
CONTROL = ["<|end|>", "<|start|>"]


def write_tiny(folder: Path, seed: int = 0) -> Path:
    """Write a random Llama model of a few ten thousand weights, float32.

    Parameters
    ----------
    folder : Path
        Must not exist.
    seed : int
        Of the weights.

    Returns
    -------
    Path
        The folder, laid out as that of the embedded model: ``config.json``, ``model.safetensors``, ``tokenizer.json`` and a
        GGUF file. Any name of a backend goes with it in :func:`pcdlab.models.load`. Its tokens are single bytes.

    Raises
    ------
    ModelError
        If the folder exists or cannot be written.
    """
    with tempfile.TemporaryDirectory() as elsewhere:
        draft = Path(elsewhere) / "tiny.gguf"
        _write_gguf(draft, np.random.default_rng(seed))
        convert(draft, folder)
        shutil.copyfile(draft, folder / draft.name)
    return folder


def _write_gguf(path: Path, rng: np.random.Generator) -> None:
    letters = sorted(ByteLevel.alphabet())
    merge = letters[0] * 2  # llama.cpp insists on one
    tokens = [*CONTROL, *letters, merge]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(CONTROL) + [TokenType.NORMAL] * (len(letters) + 1))
    writer.add_token_merges([f"{letters[0]} {letters[0]}"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    for name, shape in _shapes(len(tokens)).items():
        weight = rng.normal(0.0, SPREAD, shape) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
        writer.add_tensor(f"{name}.weight", weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    keys = WIDTH // HEADS * KEY_HEADS
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (keys, WIDTH),
        "attn_v": (keys, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    ends: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, WIDTH), "output_norm": (WIDTH,)}
    return ends | {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
