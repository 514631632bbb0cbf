"""Matrix products with a fixed weight, laid out the way that the device reads it fastest."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens that the packed layout is made for; it serves any other number as well.
_PACKED_FOR = 64


class Linear:
    """y = x @ weight.T + bias.

    Attributes:
        weight: (N, K); None once it is packed.
        bias: (N,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Lays the weight out for oneDNN's blocked kernels, where torch has them for this device and dtype.

        Decode multiplies few rows by every weight, so the speed at which weights stream from memory decides. On a CPU,
        in float32, the blocked layout reads 1.5 times faster for 1 row and 2 to 3 times faster for 2 to 64 rows.
        """
        if self.weight is not None and can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR)
            self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x (T, K); returns (T, N)."""
        if self._packed is not None:
            rows = x.shape[0]
            if padding := padded_rows(rows) - rows:
                x = F.pad(x, (0, 0, 0, padding))
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return y[:rows]
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


def padded_rows(rows: int) -> int:
    """`rows` rounded up to one of eight sizes for each power of two; exact below 16.

    oneDNN compiles code for every number of rows and keeps it, about half a MB for each matrix shape: steps of any size
    up to 2,048 tokens would leave gigabytes. Padding costs less than an eighth of the work.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this weight natively."""
    capabilities = torch.cpu.get_capabilities()
    if weight.device.type != "cpu" or capabilities["architecture"] != "x86_64" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and cpu_computes_bfloat16()


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU has bfloat16 arithmetic (AVX-512 BF16, AMX or Arm's BF16), rather than an emulation of it."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
