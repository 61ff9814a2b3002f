"""LoRA with `peft`: the frozen weights are read from the drive and never written. usage: peft_lora.py FOLDER"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import tieroff


def main(folder: str) -> None:
    config = {
        "budget": {"device": "50%", "host": 0, "nvme": "64MiB"},  # half of what the step needs without tieroff
        "nvme": {"dirs": [folder], "staging": "4MiB"},
    }
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=64, **size))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    tieroff.wrap(model, optimizer, config)
    for step in range(6):
        torch.manual_seed(step)
        tokens = torch.randint(0, 512, (1, 16))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = tieroff.engine(model).stats().moved_bytes
        print(f"step {step}: loss {loss.item():.4f}, read {moved['nvme_read']} bytes, written {moved['nvme_write']}")
    print(tieroff.engine(model).explain())


if __name__ == "__main__":
    main(sys.argv[1])
