"""The decoder's forward pass with the kernels of `kernels.gpu`, over memory that is allocated once.

Every step of a size runs the same launches on the same addresses, so that a CUDA graph can replay it. Weights and the
order of operations are those of `engine.model.decoder`, its twin; letters as there. Knows no rows' parameters.

The last layer ends with K and V: what follows them is computed for the tokens that are sampled from alone. Of the
others, most of a prompt's, nothing else is ever read.
"""

import numpy as np
import torch
from torch import Tensor

from engine.device import LoadedModel
from engine.gpu.inputs import RowState, StepInputs, on_device
from engine.model.decoder import Layer
from engine.model.rope import inverse_frequencies
from kernels.gpu.activation import silu_mul
from kernels.gpu.decode_attention import DecodePlan, decode_attention, plan_decode
from kernels.gpu.matmul import Workspace, gate_up_silu, linear
from kernels.gpu.norm import add_rms_norm, embed_rms_norm, rms_norm
from kernels.gpu.prefill_attention import prefill_attention, prefill_config, prefill_tiles
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
        max_tokens, max_samples: largest step; no more samples than tokens, whose memory `logits` uses.
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
        self._last_qkv = room(max_samples, heads + 2 * kv_heads, config.head_dim)
        self._last_residual = room(max_samples, config.hidden_size)
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
    def block_m(self) -> int:
        """Queries of a tile of prefill attention."""
        return self._prefill.block_m

    def body(self, inputs: StepInputs, state: RowState, kv_cache: Tensor, tokens: int, *, chunks: bool) -> None:
        """Runs the step's tokens through the layers, the last up to K and V; writes all K and V.

        Args:
            kv_cache: (layers, pages, page_size, 2, K, d), changed; of the pages the last takes the padding's.
            tokens: with padding.
            chunks: whether there may be works of more than one token.
        """
        config, decoder = self._config, self._decoder
        rows, positions = inputs.rows[:tokens], inputs.positions[:tokens]
        ids, slots = self._tokens[:tokens], self._slots[:tokens]
        x, residual = self._x[:tokens], self._residual[:tokens]
        q, attended = self._qkv[:tokens, : config.num_heads], self._attended[:tokens]
        queries = min(tokens, len(inputs.lengths))
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
        embed_rms_norm(ids, decoder.embedding, residual, decoder.layers[0].input_norm, config.rms_norm_eps, x)
        # Enough for a few sequences; more share the programs.
        programs = -(-tokens // self.block_m) + _MORE_TILES
        for layer, cache, following in zip(decoder.layers, kv_cache, decoder.layers[1:], strict=False):
            self._write_kv(layer, cache, inputs, tokens)
            decode_attention(q, cache, state.page_table, self._plan, attended, window=layer.window)
            if chunks:
                tiles, count = inputs.tiles, inputs.num_tiles
                prefill_attention(
                    q, cache, state.page_table, tiles, count, attended, programs=programs, window=layer.window
                )
            self._rest(layer, attended, residual, following.input_norm, x)
        self._write_kv(decoder.layers[-1], kv_cache[-1], inputs, tokens)

    def logits(self, inputs: StepInputs, state: RowState, kv_cache: Tensor, samples: int) -> Tensor:
        """What is left of the last layer after `body`, and the head, for the tokens that `inputs.last` names.

        Args:
            kv_cache: as `body` left it.
            samples: with padding.

        Returns:
            (samples, V), in the model's dtype.
        """
        layer, x, logits = self._decoder.layers[-1], self._x[:samples], self._logits[:samples]
        qkv, residual, attended = self._last_qkv[:samples], self._last_residual[:samples], self._attended[:samples]
        take_rows(self._qkv.flatten(1), inputs.last[:samples], qkv.flatten(1))
        take_rows(self._residual, inputs.last[:samples], residual)
        # To one query a decode's attention is any token's: each sees all keys up to its own.
        plan_decode(self._plan, inputs.last_rows[:samples], inputs.last_positions[:samples], inputs.num_samples)
        q = qkv[:, : self._config.num_heads]
        decode_attention(q, kv_cache[-1], state.page_table, self._plan, attended, window=layer.window)
        self._rest(layer, attended, residual, self._decoder.norm, x)
        linear(x, _weight(self._decoder.lm_head), logits, self._workspace)
        return logits

    def hidden(self, state: RowState, kv_cache: Tensor, chunk: tuple[int, int, int, int]) -> Tensor:
        """What is left of the last layer after `body`, for tokens of a sequence that follow one another.

        It overwrites what `logits` reads of these tokens, and so comes after it, once for each of them.

        Args:
            kv_cache: as `body` left it.
            chunk: first token of the step, row, its position there, how many.

        Returns:
            (N, D), normalised, until the next step: what `logits_of` takes.
        """
        first, _, _, count = chunk
        layer, device, span = self._decoder.layers[-1], kv_cache.device, slice(first, first + count)
        tiles = on_device(prefill_tiles([chunk], self.block_m), device)
        number = on_device(np.array([len(tiles), 0], np.int32), device)
        q = self._qkv[:, : self._config.num_heads]
        prefill_attention(
            q,
            kv_cache[-1],
            state.page_table,
            tiles,
            number,
            self._attended,
            programs=len(tiles),
            window=layer.window,
        )
        x = self._x[span]
        self._rest(layer, self._attended[span], self._residual[span], self._decoder.norm, x)
        return x

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Returns (N, V) float32 of hidden states (N, D), in memory of its own."""
        logits = torch.empty(len(hidden), self._config.vocab_size, dtype=hidden.dtype, device=hidden.device)
        linear(hidden, _weight(self._decoder.lm_head), logits, self._workspace)
        return logits.float()

    def _write_kv(self, layer: Layer, cache: Tensor, inputs: StepInputs, tokens: int) -> None:
        """The layer's q, k and v of the step's tokens: q stays in self._qkv, k and v go into the layer's cache."""
        x, qkv = self._x[:tokens], self._qkv[:tokens]
        positions, slots = inputs.positions[:tokens], self._slots[:tokens]
        linear(x, _weight(layer.qkv), qkv.flatten(1), self._workspace)
        norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
        eps = self._config.rms_norm_eps
        rope_kv(qkv, positions, slots, self._rope, cache, bias=layer.qkv.bias, **norms, eps=eps)

    def _rest(self, layer: Layer, attended: Tensor, residual: Tensor, next_norm: Tensor, x: Tensor) -> None:
        """Adds attention (T, H, d) and the feed-forward block to the residual; x becomes that, normalised."""
        gate_up, gated = self._gate_up[: len(x)], self._gated[: len(x)]
        self._add_product(attended.flatten(1), layer.o, residual, layer.post_norm, x)
        if layer.gate_up.bias is None:
            gate_up_silu(x, _weight(layer.gate_up), gated, self._workspace, gate_up)
        else:
            self._product(x, layer.gate_up, gate_up)
            silu_mul(gate_up, gated)
        self._add_product(gated, layer.down, residual, next_norm, x)

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
