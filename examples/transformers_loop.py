"""A model of `transformers` in an ordinary loop: wrap it, and nothing else changes. usage: transformers_loop.py FOLDER"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tieroff


def main(folder: str) -> None:
    config = {
        "budget": {"device": "50%", "host": 0, "nvme": "64MiB"},  # half of what the step needs without tieroff
        "nvme": {"dirs": [folder], "staging": "4MiB"},
    }
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4, **ids))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = tieroff.wrap(model, optimizer, config)
    for step in range(6):
        torch.manual_seed(step)
        tokens = torch.randint(0, 512, (4, 32))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, moved {sum(tieroff.engine(model).stats().moved_bytes.values())} bytes")
    print(tieroff.engine(model).explain())
    tieroff.unwrap(model)


if __name__ == "__main__":
    main(sys.argv[1])
