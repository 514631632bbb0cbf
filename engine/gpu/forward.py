"""The decoder's forward pass with the kernels of `kernels.gpu`, over memory that is allocated once.

Every step of a size runs the same launches on the same addresses, so that a CUDA graph can replay it. Weights and the
order of operations are those of `engine.model.decoder`, its twin; letters as there. Knows no rows' parameters.
"""

import torch
from torch import Tensor

from engine.device import LoadedModel
from engine.gpu.inputs import RowState, StepInputs
from engine.model.rope import inverse_frequencies
from kernels.gpu.activation import silu_mul
from kernels.gpu.decode_attention import DecodePlan, decode_attention, plan_decode
from kernels.gpu.matmul import Workspace, gate_up_silu, linear
from kernels.gpu.norm import add_rms_norm, embed_rms_norm, rms_norm
from kernels.gpu.prefill_attention import prefill_attention, prefill_config
from kernels.gpu.rope import rope_kv, rope_table
from kernels.gpu.rows import gather_tokens, take_rows
from kernels.linear import Linear

_MORE_TILES = 6
# Rows up to which products may be our own (`kernels.gpu.matmul`).
_SKINNY = 64


class Forward:
    """From a step's inputs to logits.

    Args:
        model: whose weights are used.
        max_tokens, max_samples: largest step.
    """

    def __init__(self, model: LoadedModel, *, max_tokens: int, max_samples: int) -> None:
        decoder, dtype, device = model.decoder, model.dtype, model.device
        config = self._config = decoder.config
        self._decoder = decoder

        def room(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        heads, kv_heads = config.num_heads, config.num_kv_heads
        self._tokens, self._slots = ints(max_tokens), ints(max_tokens)
        self._residual = room(max_tokens, config.hidden_size)
        self._x = room(max_tokens, config.hidden_size)
        self._y = room(max_tokens, config.hidden_size)
        self._qkv = room(max_tokens, heads + 2 * kv_heads, config.head_dim)
        self._attended = room(max_tokens, heads, config.head_dim)
        self._gate_up = room(max_tokens, 2 * config.intermediate_size)
        self._gated = room(max_tokens, config.intermediate_size)
        self._last = room(max_samples, config.hidden_size)
        self._logits = room(max_samples, config.vocab_size)
        inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._rope = rope_table(inv_freq, model.max_model_len, config.rope.attention_factor)
        self._workspace = Workspace(device)
        self._prefill = prefill_config(config.head_dim, dtype)
        self._plan = DecodePlan.allocate(max_samples, heads, kv_heads, config.head_dim, dtype, device)

    @property
    def all_logits(self) -> Tensor:
        """(max_samples, V): what `logits` computed last."""
        return self._logits

    @property
    def hidden(self) -> Tensor:
        """(max_tokens, D): what `body` computed last, and logits are made of."""
        return self._x

    @property
    def block_m(self) -> int:
        """Queries of a tile of prefill attention."""
        return self._prefill.block_m

    def body(self, inputs: StepInputs, state: RowState, kv_cache: Tensor, tokens: int, *, chunks: bool) -> None:
        """Runs the step's tokens through all layers; writes their K and V. `logits` takes it from there.

        Args:
            kv_cache: (layers, pages, page_size, 2, K, d), changed; of the pages the last takes the padding's.
            tokens: with padding.
            chunks: whether there may be works of more than one token.
        """
        config, decoder = self._config, self._decoder
        heads, eps = config.num_heads, config.rms_norm_eps
        rows, positions = inputs.rows[:tokens], inputs.positions[:tokens]
        ids, slots = self._tokens[:tokens], self._slots[:tokens]
        x, residual = self._x[:tokens], self._residual[:tokens]
        qkv, attended = self._qkv[:tokens], self._attended[:tokens]
        gate_up, gated = self._gate_up[:tokens], self._gated[:tokens]
        q, queries = qkv[:, :heads], min(tokens, len(inputs.lengths))
        pages, page_size = kv_cache.shape[1:3]
        padding_slot = (pages - 1) * page_size
        gather_tokens(
            rows,
            positions,
            state.token_ids,
            state.page_table,
            ids,
            slots,
            page_size=page_size,
            padding_slot=padding_slot,
        )
        plan_decode(self._plan, rows[:queries], positions[:queries], inputs.num_decodes)
        embed_rms_norm(ids, decoder.embedding, residual, decoder.layers[0].input_norm, eps, x)
        # Enough for a few sequences; more share the programs.
        programs = -(-tokens // self.block_m) + _MORE_TILES
        following = [*(layer.input_norm for layer in decoder.layers[1:]), decoder.norm]
        for layer, cache, next_norm in zip(decoder.layers, kv_cache, following, strict=True):
            linear(x, _weight(layer.qkv), qkv.flatten(1), self._workspace)
            norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
            rope_kv(qkv, positions, slots, self._rope, cache, bias=layer.qkv.bias, **norms, eps=eps)
            decode_attention(q, cache, state.page_table, self._plan, attended, window=layer.window)
            if chunks:
                tiles, count = inputs.tiles, inputs.num_tiles
                prefill_attention(
                    q, cache, state.page_table, tiles, count, attended, programs=programs, window=layer.window
                )
            self._add_product(attended.flatten(1), layer.o, residual, layer.post_norm, x)
            if layer.gate_up.bias is None:
                gate_up_silu(x, _weight(layer.gate_up), gated, self._workspace, gate_up)
            else:
                self._product(x, layer.gate_up, gate_up)
                silu_mul(gate_up, gated)
            self._add_product(gated, layer.down, residual, next_norm, x)

    def logits(self, inputs: StepInputs, samples: int) -> Tensor:
        """The logits (samples, V), in the model's dtype, of the tokens that `inputs.last` names."""
        hidden, logits = self._last[:samples], self._logits[:samples]
        take_rows(self._x, inputs.last[:samples], hidden)
        linear(hidden, _weight(self._decoder.lm_head), logits, self._workspace)
        return logits

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Returns (N, V) float32 of hidden states (N, D), in memory of its own."""
        logits = torch.empty(len(hidden), self._config.vocab_size, dtype=hidden.dtype, device=hidden.device)
        linear(hidden, _weight(self._decoder.lm_head), logits, self._workspace)
        return logits.float()

    def _add_product(self, x: Tensor, layer: Linear, residual: Tensor, norm: Tensor, out: Tensor) -> None:
        """Adds layer(x) to the residual stream, and writes the normalised sum."""
        eps = self._config.rms_norm_eps
        if len(x) > _SKINNY and layer.bias is None:
            # cuBLAS adds while it writes: half of the norm's memory traffic is saved.
            torch.addmm(residual, x, _weight(layer).T, out=residual)
            rms_norm(residual, norm, eps, out)
        else:
            y = self._y[: len(x)]
            self._product(x, layer, y)
            add_rms_norm(y, residual, norm, eps, out)

    def _product(self, x: Tensor, layer: Linear, out: Tensor) -> None:
        linear(x, _weight(layer), out, self._workspace)
        if layer.bias is not None:
            out.add_(layer.bias)


def _weight(layer: Linear) -> Tensor:
    assert layer.weight is not None, "packed weights are the CPU's"
    return layer.weight
