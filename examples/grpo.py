"""GRPO: a policy is trained on rewards of what it wrote itself; three models take turns. usage: grpo.py FOLDER

Group relative policy optimization (Shao et al. 2024): several answers to each prompt are scored, and an answer's advantage is
its reward less the mean of its group, over the group's deviation. A frozen copy of the policy keeps it from going astray.
"""

import copy
import sys

import torch
from torch import nn

import tieroff

WORDS, WIDTH, PROMPT, ANSWER, GROUP = 32, 64, 4, 8, 4
ROUNDS, STEPS = 3, 3  # of rollout and training, and of the optimizer in each


class Writer(nn.Module):
    """A tiny language model: tokens [N, T] -> scores of the next token [N, T, WORDS]; or one score per text, as a reward."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.grow = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.mix(self.embed(tokens))
        return self.head(mixed + self.grow(mixed))


def write(policy: nn.Module, prompts: torch.Tensor) -> torch.Tensor:
    """Returns prompts with an answer of ANSWER tokens each, drawn from the policy."""
    tokens = prompts
    with torch.no_grad():
        for _ in range(ANSWER):
            chances = policy(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
    return tokens


def chosen(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logarithms of the chances of the tokens that were chosen, [N, ANSWER]."""
    logs = model(tokens[:, :-1]).log_softmax(-1)
    return logs.gather(2, tokens[:, 1:, None])[:, -ANSWER:, 0]


def train(folder: str | None) -> list[torch.Tensor]:
    """Returns the losses, and the policy's parameters at the end; without a folder of a plain run."""
    torch.manual_seed(0)
    policy, reward = Writer(WORDS), Writer(1).requires_grad_(False)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    models = [policy, reference, reward]
    if folder is not None:
        config = {
            "budget": {"host": 0, "nvme": "64MiB"},
            "nvme": {"dirs": [folder], "staging": "4MiB"},
            "plan": {"min_bytes": 0},  # such small tensors are not worth moving elsewhere
        }
        tieroff.wrap(models, [optimizer, None, None], config, budget="60%")
    losses = []
    for turn in range(ROUNDS):
        torch.manual_seed(turn)
        prompts = torch.randint(WORDS, (4, PROMPT)).repeat_interleave(GROUP, 0)
        if folder is not None:
            tieroff.sleep(policy)  # its optimizer state rests while it writes, and what it writes with comes as it is used
        texts = write(policy, prompts)
        with torch.no_grad():
            rewards = reward(texts)[:, -1, 0].view(-1, GROUP)
            before, kept = chosen(policy, texts), chosen(reference, texts)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        if folder is not None:
            tieroff.wake(policy)
        for _ in range(STEPS):
            logs = chosen(policy, texts)
            ratio, away = (logs - before).exp(), kept - logs
            gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = (0.04 * (away.exp() - away - 1) - gain).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    if folder is not None:
        stats = tieroff.engine(policy).stats()
        print(f"policy: {stats.phase}, moved {sum(stats.moved_bytes.values())} bytes in its last step")
        for model in models:
            tieroff.unwrap(model)
    return [*losses, *(parameter.detach() for parameter in policy.parameters())]


if __name__ == "__main__":
    train(sys.argv[1])
