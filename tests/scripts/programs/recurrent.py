"""A recurrent language model: truncated backpropagation, with the hidden state carried over and detached."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.scripts.script import Script

WORDS, WIDTH = 60, 48


class Language(nn.Module):
    """Words to the next ones, and the state to go on from."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, state = self.rnn(self.drop(self.encoder(words)), state)
        return nn.functional.log_softmax(self.decoder(self.drop(out)).view(-1, WORDS), dim=1), state


def main(script: Script) -> None:
    model = Language()
    script.wrap(model)
    text = torch.randint(0, WORDS, (101, 8))
    for _ in range(2):
        state: tuple[Tensor, ...] = (torch.zeros(2, 8, WIDTH), torch.zeros(2, 8, WIDTH))
        for at in range(0, 100, 12):
            words, targets = text[at : min(at + 12, 100)], text[at + 1 : min(at + 13, 101)]
            model.zero_grad()
            state = tuple(part.detach() for part in state)
            out, state = model(words, state)
            loss = nn.functional.nll_loss(out, targets.reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-2.0)
            script.log(loss)
    model.eval()
    with torch.no_grad():
        script.log(model(text[:20], (torch.zeros(2, 8, WIDTH), torch.zeros(2, 8, WIDTH)))[0].mean())
    script.keep(model=model, state=state)
