"""A loop of `accelerate` with accumulation and clipping: prepare by tieroff. usage: accelerate_loop.py FOLDER"""

import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import tieroff
from tieroff.integrations.accelerate import prepare


def main(folder: str) -> None:
    config = {
        "budget": {"device": "50%", "host": 0, "nvme": "64MiB"},  # half of what the step needs without tieroff
        "nvme": {"dirs": [folder], "staging": "4MiB"},
    }
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=64, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randint(0, 512, (48, 32)), batch_size=4)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, config=config)
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")
    print(tieroff.engine(model).explain())


if __name__ == "__main__":
    main(sys.argv[1])
