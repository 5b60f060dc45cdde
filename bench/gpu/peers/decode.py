"""Decode attention of PyTorch over the kept cache: q [B, Hq, d], lists (b, h) of rows offsets[i] .. offsets[i + 1]."""

import itertools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


def padded(rows: torch.Tensor, lengths: list[int], batch: int, multiple: int) -> torch.Tensor:
    """[B, Hkv, longest, d] from lists behind each other; zeros behind a list's end."""
    longest = -(-max(lengths) // multiple) * multiple
    lists = [F.pad(part, (0, 0, 0, longest - part.shape[0])) for part in rows.split(lengths)]
    return torch.stack(lists).view(batch, -1, longest, rows.shape[-1])


class Sdpa:
    """scaled_dot_product_attention on [B, Hkv, L, d], in whichever way and on whichever backend is fastest."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], estimate_ms):
        self.mask = None
        if min(lengths) < k.shape[2]:
            ends = torch.tensor(lengths, device=q.device).view(k.shape[0], -1, 1, 1)
            hidden = torch.arange(k.shape[2], device=q.device) >= ends
            bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
            self.mask = bias.expand(-1, -1, q.shape[1] // k.shape[1], -1).contiguous()
        times = {}
        for backend, grouped in itertools.product(BACKENDS, (True, False)):
            self.backend, self.grouped = backend, grouped
            try:
                times[backend, grouped] = estimate_ms([lambda: self.run(q, k, v)], 5)
            except RuntimeError:  # the backend does not take these shapes
                continue
        if not times:
            raise RuntimeError("no backend of scaled_dot_product_attention takes these shapes")
        self.backend, self.grouped = min(times, key=times.get)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, g, d] or [B, Hq, 1, d]."""
        mask, group = self.mask, q.shape[1] // k.shape[1]
        with sdpa_kernel(self.backend):
            if self.grouped:  # the g query heads of a KV head are the rows of one head
                rows = q.view(q.shape[0], k.shape[1], group, -1)
                return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
            if mask is not None:
                mask = mask[:, :, :1].repeat_interleave(group, 1)
            return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True)

    def name(self) -> str:
        return f"torch sdpa {self.backend.name.split('_')[0].lower()}"


class Varlen:
    """Lists as sequences of flash attention's packed form, with one head: the g query heads are the query tokens.

    The call is that of torch.nn.attention.varlen.varlen_attn, less what autograd needs.
    """

    def __init__(self, group: int, lengths: list[int]):
        counts = torch.tensor([0, *lengths], device="cuda")
        self.key_starts = counts.cumsum(0).to(torch.int32)
        self.row_starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda") * group
        self.group, self.longest = group, max(lengths)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[B * Hq, 1, d]."""
        rows = q.view(-1, 1, q.shape[-1])
        starts, longest = (self.row_starts, self.key_starts), (self.group, self.longest)
        attend = torch.ops.aten._flash_attention_forward
        return attend(rows, k[:, None], v[:, None], *starts, *longest, 0.0, False, return_debug_mask=False)[0]
