"""Inputs that a quantisation kernel can get wrong."""

import torch


def hard(rows: int, k: int, dtype: torch.dtype, device="cpu", seed=0) -> torch.Tensor:
    """Random normal, and among its rows every kind that needs care: one kind per row, repeated every 16 rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    info = torch.finfo(dtype)
    steps = torch.arange(k).float()
    kinds = [
        lambda row: row * 0,
        lambda row: row * -0.0,
        lambda row: row * info.smallest_normal,
        lambda row: (row * 100 * info.smallest_normal * info.eps).to(dtype).float(),  # subnormal
        lambda row: row.clamp(-1, 1) * info.max,
        lambda row: torch.where(steps % 50 == 7, torch.nan, row),
        lambda row: torch.where(steps % 60 == 5, torch.inf, row),
        lambda row: torch.where(steps % 60 == 5, -torch.inf, row * info.max / 8),
        lambda row: torch.full_like(row, torch.nan),
        lambda row: torch.full_like(row, -torch.inf),
        lambda row: (steps % 128 - 64) * 7,  # amax 448: quotients are whole numbers, many of them midpoints
        lambda row: torch.where(steps % 128 == 0, 448.0, 2.0**-10 * (steps % 64 - 32)),  # midpoints of subnormals
        lambda row: row * 10.0 ** torch.linspace(-4, 4, k),
    ]
    for i in range(1, rows):
        if i % 16 < len(kinds):
            x[i] = kinds[i % 16](x[i])
    return x.to(dtype).to(device)
