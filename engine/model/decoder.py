"""The decoder of all supported families: what differs between them is configuration.

Letters in shape comments: T tokens of the step, D hidden_size, H query heads, K key-value heads, d head_dim,
I intermediate_size, V vocab_size. Knows nothing of files, sequences or sampling.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.rope import inverse_frequencies
from kernels.activation import silu_mul
from kernels.attention import AttentionPlan, paged_attention
from kernels.linear import Linear
from kernels.norm import add_rms_norm, rms_norm
from kernels.rope import rope_angles, rotate, write_kv


@dataclass(slots=True)
class Layer:
    """Weights of one layer; q, k and v share one matrix, and so do gate and up."""

    input_norm: Tensor  # (D,)
    qkv: Linear  # ((H + 2K) d, D)
    q_norm: Tensor | None  # (d,)
    k_norm: Tensor | None  # (d,)
    o: Linear  # (D, H d)
    post_norm: Tensor  # (D,)
    gate_up: Linear  # (2I, D)
    down: Linear  # (D, I)
    window: int | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices."""
        return (self.qkv, self.o, self.gate_up, self.down)


class Decoder:
    """Token ids in, hidden states and logits out. Its weights are made empty; `engine.model.weights` fills them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._dtype = dtype
        self._device = device
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._layer(window) for window in config.layer_windows]
        self.norm = self._empty(config.hidden_size)
        head = self.embedding if config.tie_embeddings else self._empty(config.vocab_size, config.hidden_size)
        self.lm_head = Linear(head)
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)

    def forward(
        self, tokens: Tensor, positions: Tensor, kv_cache: Tensor, plan: AttentionPlan, wanted: Tensor | None = None
    ) -> Tensor:
        """Runs the step's tokens through all layers; writes their K and V.

        Args:
            tokens: (T,) integers.
            positions: (T,) integers, of the tokens in their sequences.
            kv_cache: (layers, pages, page_size, 2, K, d), changed.
            plan: made for these tokens.
            wanted: (N,) integers, the tokens whose hidden states are returned (None: all). Of the others nothing but K
                and V is ever read, so the last layer ends with those.

        Returns:
            (N, D), normalised: what `logits` takes.
        """
        config = self.config
        heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        cos, sin = rope_angles(positions, self._inv_freq, config.rope.attention_factor)
        residual = F.embedding(tokens, self.embedding)  # (T, D)
        x = rms_norm(residual, self.layers[0].input_norm, eps)
        following = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, layer_cache, next_norm in zip(self.layers, kv_cache, following, strict=True):
            qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, config.head_dim)  # (T, H + 2K, d)
            qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = torch.split(qk, [heads, kv_heads], 1)
                qk = torch.cat((rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)), 1)
            q, k = torch.split(rotate(qk, cos, sin), [heads, kv_heads], 1)
            write_kv(k, v, layer_cache, plan.slots)
            attended = paged_attention(q, layer_cache, plan, window=layer.window)  # (T, H, d)
            if wanted is not None and layer is self.layers[-1]:
                attended, residual = attended[wanted], residual[wanted]
            x = add_rms_norm(layer.o(attended.flatten(1)), residual, layer.post_norm, eps)
            x = add_rms_norm(layer.down(silu_mul(layer.gate_up(x))), residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns (N, V) float32 of the hidden states (N, D) that a token is sampled from."""
        return self.lm_head(hidden).float()

    def weights(self) -> dict[str, Tensor]:
        """Every weight by its Hugging Face name; where matrices are fused, views of their parts. Not after `pack`."""
        config = self.config
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not config.tie_embeddings:
            named["lm_head.weight"] = _unpacked(self.lm_head)
        for number, layer in enumerate(self.layers):
            prefix = f"model.layers.{number}."
            named[prefix + "input_layernorm.weight"] = layer.input_norm
            named[prefix + "post_attention_layernorm.weight"] = layer.post_norm
            if layer.q_norm is not None and layer.k_norm is not None:
                named[prefix + "self_attn.q_norm.weight"] = layer.q_norm
                named[prefix + "self_attn.k_norm.weight"] = layer.k_norm
            qkv = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
            gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
            parts = {
                "self_attn.": (layer.qkv, qkv),
                "self_attn.o_proj": (layer.o, {"": config.hidden_size}),
                "mlp.": (layer.gate_up, gate_up),
                "mlp.down_proj": (layer.down, {"": config.hidden_size}),
            }
            for block, (linear, sizes) in parts.items():
                names = [f"{prefix}{block}{part}" for part in sizes]
                for name, weight in zip(names, torch.split(_unpacked(linear), list(sizes.values())), strict=True):
                    named[name + ".weight"] = weight
                if linear.bias is not None:
                    for name, bias in zip(names, torch.split(linear.bias, list(sizes.values())), strict=True):
                        named[name + ".bias"] = bias
        return named

    def pack(self) -> None:
        """Lays the loaded weights out for speed, matrix by matrix, so that only one is in memory twice.

        A tied embedding stays as it is for the look-up, beside its packed copy.
        """
        for layer in self.layers:
            for linear in layer.linears:
                linear.pack()
        self.lm_head.pack()

    def _layer(self, window: int | None) -> Layer:
        config = self.config
        qkv_size = config.q_size + 2 * config.kv_size
        return Layer(
            input_norm=self._empty(config.hidden_size),
            qkv=self._linear(qkv_size, config.hidden_size, config.qkv_bias),
            q_norm=self._empty(config.head_dim) if config.qk_norm else None,
            k_norm=self._empty(config.head_dim) if config.qk_norm else None,
            o=self._linear(config.hidden_size, config.q_size, config.o_bias),
            post_norm=self._empty(config.hidden_size),
            gate_up=self._linear(2 * config.intermediate_size, config.hidden_size, config.mlp_bias),
            down=self._linear(config.hidden_size, config.intermediate_size, config.mlp_bias),
            window=window,
        )

    def _linear(self, outputs: int, inputs: int, bias: bool) -> Linear:
        return Linear(self._empty(outputs, inputs), self._empty(outputs) if bias else None)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _unpacked(linear: Linear) -> Tensor:
    assert linear.weight is not None, "weights are packed already"
    return linear.weight
