"""A program that computes on a stream of its own from its first line: gradients accumulate there, as in the plain run."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.accelerator import target
from tests.accelerator.users.loops import Net, Program, adamw, check


def test_gradients_accumulate_on_the_stream_that_the_program_computes_on(tmp_path: Path) -> None:
    """Elsewhere each would have two streams wait for each other, and keep its memory from both for longer."""

    def usage(p: Program) -> None:
        seen = set[int]()

        def note(_parameter: torch.Tensor) -> None:
            seen.add(torch.accelerator.current_stream(target.device()).stream_id)

        own = torch.Stream(target.device())
        with own:
            p.model = Net().to(target.device())
            p.optimizer = adamw(p.model)
            p.wrap()
            for parameter in p.parameters:
                parameter.register_post_accumulate_grad_hook(note)
            p.steps()
        torch.accelerator.current_stream(target.device()).wait_stream(own)
        p.note(seen == {own.stream_id})

    assert True in check(usage, tmp_path).seen
