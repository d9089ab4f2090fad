"""A model whose shapes fit no number of ranks, with a parameter that not every batch uses."""

import torch
from torch import Tensor, nn


class Part(nn.Module):
    """Parameters of 3, 1 and 5 rows, and one that is used only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(3, 4))
        self.bias = nn.Parameter(torch.randn(1))
        self.seldom = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        """[n, 4] in and out."""
        y = (x @ self.wide.t()) @ self.wide + self.bias
        return y * self.seldom.mean() if seldom else y


class Odd(nn.Module):
    """Three parts and a root with parameters of its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Parameter(torch.randn(4, 4))
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.last = nn.Parameter(torch.randn(7, 4))

    def forward(self, x: Tensor, seldom: bool = True) -> Tensor:
        """A scalar."""
        x = x @ self.first
        for part in self.parts:
            x = part(x, seldom)
        return (x @ self.last.t()).tanh().mean()


def batch(seed: int) -> Tensor:
    """[6, 4]."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
