"""The shapes, ids and limits of the embedded pair: the one place where they are written down."""

from dataclasses import dataclass

SEED = 20261129
VOCAB = 4096
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
END_OF_TEXT, IM_START, IM_END, MASK = range(VOCAB - 4, VOCAB)
# Token files hold 12-bit ids in 16 bits; the top bit marks tokens an assistant said.
SAID, ID_BITS = 0x8000, 0x0FFF
WINDOW = 1024
# Sampled answers: prompts up to PROMPT_LIMIT tokens, and ANSWERED tokens of prompt and answer together.
PROMPT_LIMIT, ANSWERED = 224, 576
KINDS = ("explain", "code", "list", "story", "arithmetic")
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class TargetShape:
    """A `qwen3_5` hybrid: every `interval`-th layer is full attention, the others are gated-delta layers."""

    hidden: int = 256
    intermediate: int = 704
    layers: int = 8
    interval: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 64
    conv_kernel: int = 4
    rotary: float = 0.25
    theta: float = 10000.0
    eps: float = 1e-6
    vocab: int = VOCAB


@dataclass(frozen=True)
class DraftShape:
    """A DFlash 2 draft: sliding layers, bidirectional in the block, two-tap convolutions, a candidate selector."""

    hidden: int = 256
    intermediate: int = 576
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 128
    theta: float = 10000.0
    eps: float = 1e-6
    vocab: int = VOCAB
    block: int = 8
    taps: tuple[int, ...] = (1, 3, 5, 6)
    conv_kernel: int = 2
    conv_group: int = 16
    rank: int = 64
    top_k: int = 16
    mask_id: int = MASK
    target_layers: int = 8
