"""A graph convolution: the whole graph in one batch, with a sparse adjacency, and parameters that are no Linear's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.scripts.script import Script

NODES = 90


class Convolution(nn.Module):
    """Sums over neighbours of what a weight makes of them."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(nn.init.xavier_normal_(torch.empty(width, out)))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, x @ self.kernel) + self.bias


class Graph(nn.Module):
    """Convolutions of one width, the last one into classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Convolution(48, 48) for _ in range(4)])
        self.last = Convolution(48, 7)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, adjacency = inputs
        for layer in self.layers:
            x = nn.functional.dropout(torch.relu(layer(x, adjacency)), 0.3, self.training)
        return torch.log_softmax(self.last(x, adjacency), dim=1)


def main(script: Script) -> None:
    pairs = torch.randint(0, NODES, (2, 300))
    pairs = torch.cat([pairs, pairs.flip(0), torch.arange(NODES).repeat(2, 1)], dim=1)
    adjacency = torch.sparse_coo_tensor(pairs, torch.full((pairs.shape[1],), 0.2), (NODES, NODES)).coalesce()
    features, labels = torch.randn(NODES, 48), torch.randint(0, 7, (NODES,))
    order = torch.randperm(NODES)
    seen, unseen = order[:60], order[60:]
    model = Graph()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    script.wrap(model, optimizer)
    for _ in range(12):
        model.train()
        optimizer.zero_grad()
        out = model((features, adjacency))
        loss = nn.functional.nll_loss(out[seen], labels[seen])
        loss.backward()
        optimizer.step()
        script.log(loss)
        model.eval()
        with torch.no_grad():
            script.log((model((features, adjacency))[unseen].argmax(1) == labels[unseen]).float().mean())
    script.keep(model=model, optimizer=optimizer)
