"""What ops and tensors of a recorded step are called before people: module, what happens, line."""

from __future__ import annotations

from tieroff.core.trace import Trace

_ENDS = {"forward": "the forward begins", "end": "after the update"}


def op_words(trace: Trace) -> list[str]:
    """Returns per op what people call it; the names of its tick stay its key in plans and files."""
    labels = {tensor.name: tensor.label for tensor in trace.tensors if tensor.label}
    return [_words(op.name, labels) for op in trace.ops]


def named(name: str, words: str) -> str:
    """Returns a key and what it means, or the key alone where that is all that is known."""
    return name if words == name else f"{name}: {words}"


def _words(name: str, labels: dict[str, str]) -> str:
    kind, _, rest = name.partition(":")
    path, _, leaf = rest.rpartition(".")
    path = path or "the model"
    match kind:
        case "pack":
            return labels.get(f"activation:{rest}", name)
        case "unpack":
            label = labels.get(f"activation:{rest}")
            return f"backward of {label}" if label else name
        case "param":
            return f"{path} uses {leaf}"
        case "saved":
            return f"backward of {path} uses {leaf}"
        case "grad" | "accumulate":
            return f"the gradient of {leaf} of {path} arrives"
        case "gather" | "reduce":
            return f"{'all-gather' if kind == 'gather' else 'reduce-scatter'} of the group of {rest}"
        case "bucket":
            return f"update of the optimizer's bucket {rest}"
        case _:
            return _ENDS.get(name, name)
