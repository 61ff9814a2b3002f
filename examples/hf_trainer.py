"""Hugging Face `Trainer`: one callback. usage: hf_trainer.py FOLDER"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tieroff
from tieroff.integrations.transformers import TieroffCallback


def main(folder: str) -> None:
    config = {
        "budget": {"device": "50%", "host": 0, "nvme": "64MiB"},  # half of what the step needs without tieroff
        "nvme": {"dirs": [folder], "staging": "4MiB"},
    }
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4, **ids))
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 512, (24, 32))]
    arguments = TrainingArguments(
        f"{folder}/out",
        max_steps=6,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[TieroffCallback(config)])
    trainer.train()
    print(tieroff.engine(model).explain())
    tieroff.unwrap(model)


if __name__ == "__main__":
    main(sys.argv[1])
