"""Lightning: one callback. usage: lightning_fit.py FOLDER"""

import sys

import lightning
import torch
from torch import nn

import tieroff
from tieroff.integrations.lightning import TieroffCallback


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)), nn.Linear(256, 8))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(folder: str) -> None:
    config = {
        "budget": {"device": "50%", "host": 0, "nvme": "64MiB"},  # half of what the step needs without tieroff
        "nvme": {"dirs": [folder], "staging": "4MiB"},
    }
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(96, 256), torch.randint(0, 8, (96,)))
    trainer = lightning.Trainer(max_epochs=1, callbacks=[TieroffCallback(config)], logger=False, enable_checkpointing=False)
    model = Classifier()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    print(tieroff.engine(model).explain())


if __name__ == "__main__":
    main(sys.argv[1])
