"""A joint memory: several tensors that move as one.

[Note: several parts]
A tensor of a wrapper subclass is the tensors inside it; a quantized parameter is its packed bytes, and the scales that say what
they mean. Each use wants all of them. So they are put into one memory when the engine takes them over, which moves by one copy,
is one tensor of the trace and of the plan, and has one item. The objects stay: what each lies on changes, at the same time.
Two that lay on the same bytes (the int8 weight and the alias that its matmul keeps) lie on the same bytes there, and a view of
what is there whole (the first singular vectors that a projector keeps of all that were computed) is a view of it there. One
that user code gives other memory keeps that, and is taken over again with the others when the next step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tieroff.runtime.items.offloaded import address_of, set_data, untouched, version_of
from tieroff.runtime.movable import is_dense, is_whole
from tieroff.runtime.tensors import bytes_of, storage_of, unseen, view_of

# What torch's allocator of the host gives, and more than any kernel loads at once.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Region:
    """Bytes of a joint memory that move with everything that lies on them."""

    first_byte: int
    size_bytes: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        return bytes_of(memory)[self.first_byte : self.first_byte + self.size_bytes]


class Piece:
    """One of the tensors.

    Attributes:
        tensor: it.
        dtype, size, stride: its geometry.
        region: on which it lies.
        first_byte: where it begins in the joint memory.
        placeholder: what it lies on while its bytes lie below a device.
    """

    __slots__ = ("_on", "dtype", "first_byte", "placeholder", "region", "size", "stride", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, region: _Region, first_byte: int) -> None:
        self.tensor, self.region, self.first_byte = tensor, region, first_byte
        self.dtype, self.size, self.stride = tensor.dtype, tuple(tensor.size()), tuple(tensor.stride())
        self.placeholder: torch.Tensor | None = None
        self._on = _storage_of(tensor)
        self.version = version_of(tensor)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns what the tensor is on a joint memory."""
        return view_of(memory, self.dtype, self.size, self.stride, self.first_byte // self.dtype.itemsize)

    @property
    def is_elsewhere(self) -> bool:
        """True when somebody gave the tensor memory of his own."""
        return _storage_of(self.tensor) != self._on

    def lies_at(self, first_byte: int) -> bool:
        """True when it lies on the joint memory that begins there."""
        return address_of(self.tensor) == first_byte + self.first_byte

    def lie_on(self, value: torch.Tensor) -> None:
        """It lies on this from here on."""
        set_data(self.tensor, value)
        self._on = _storage_of(value)


class Joint:
    """The memory of several tensors, the first of which is an item's own; see [Note: several parts].

    Args:
        tensors: in order; `movable.why_not_together` has nothing against them.

    Attributes:
        others: all but the first.
        size_bytes: of the memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        regions: dict[tuple[int, int], _Region] = {}
        whole = {_storage_of(tensor): tensor for tensor in tensors if is_whole(tensor)}
        end = 0
        self._pieces = list[Piece]()
        for tensor in tensors:
            all_of_it = whole.get(_storage_of(tensor), tensor)
            address, size_bytes = key = address_of(all_of_it), all_of_it.numel() * all_of_it.element_size()
            if key not in regions:
                regions[key] = _Region(end, size_bytes)
                end += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            region = regions[key]
            self._pieces.append(Piece(tensor, region, region.first_byte + address_of(tensor) - address))
        self.size_bytes = end
        self.others = tuple(piece.tensor for piece in self._pieces[1:])

    def gather(self, memory: torch.Tensor) -> None:
        """Puts all of them into one memory, given as a 1-d uint8 tensor of `size_bytes`."""
        with untouched(), torch.no_grad():
            for piece in self._pieces:
                if is_dense(piece.tensor):  # any other one is a view of one that is
                    piece.view(memory).copy_(piece.tensor.detach())
            for piece in self._pieces:
                piece.lie_on(piece.view(memory))

    def follow(self, memory: torch.Tensor) -> None:
        """The first lies on this joint memory: so do the others, but for those that somebody gave other memory."""
        address = storage_of(memory)
        for piece in self._pieces[1:]:
            if piece._on != address and not piece.is_elsewhere:
                piece.lie_on(piece.view(memory))

    def make_placeholders(self, make: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Makes what the others lie on while their bytes lie below a device."""
        for piece in self._pieces[1:]:
            piece.placeholder = make(piece.tensor.detach())

    def hide(self) -> None:
        """The first is offloaded: so are the others."""
        for piece in self._pieces[1:]:
            if piece.placeholder is not None and not piece.is_elsewhere:
                piece.lie_on(piece.placeholder)

    @property
    def is_hidden(self) -> bool:
        """True while all the others lie on what is offloaded."""
        return all(piece.placeholder is not None and piece._on == storage_of(piece.placeholder) for piece in self._pieces[1:])

    def lies_at(self, first_byte: int) -> bool:
        """True when all the others lie on the joint memory that begins there."""
        return all(piece.lies_at(first_byte) for piece in self._pieces[1:])

    @property
    def is_as_put(self) -> bool:
        """True while nobody gave one of the others other memory."""
        return not any(piece.is_elsewhere for piece in self._pieces[1:])

    def note(self) -> None:
        """Remembers the versions of the others, at which all copies are equal."""
        for piece in self._pieces[1:]:
            piece.version = version_of(piece.tensor)

    def was_written(self) -> bool:
        """True when one of the others was written since."""
        return any(version_of(piece.tensor) != piece.version for piece in self._pieces[1:])

    def held_on(self, held: torch.Tensor, memory: torch.Tensor) -> torch.Tensor | None:
        """Returns what one of the tensors is on a joint memory of the host; None: it is none of them."""
        return next((apart(piece.view(memory)) for piece in self._pieces if piece.tensor is held), None)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Returns what all of them are on a joint memory of the host, in order."""
        return [apart(piece.view(memory)) for piece in self._pieces]

    def part(self, memory: torch.Tensor | None) -> None:
        """Gives each of them memory of its own, with its bytes of a joint one; None: with those that it has.

        Those that lay on the same bytes go on to. What somebody gave other memory keeps that.
        """
        copies: dict[_Region, torch.Tensor] = {}
        with untouched(), torch.no_grad():
            for piece in self._pieces:
                if piece.is_elsewhere:
                    continue
                region = piece.region
                if region not in copies:
                    copies[region] = region.of(memory if memory is not None else piece.tensor.detach()).clone()
                first = (piece.first_byte - region.first_byte) // piece.dtype.itemsize
                piece.lie_on(view_of(copies[region], piece.dtype, piece.size, piece.stride, first))

    def let_go(self) -> None:
        """Ends the care for all of them: what the optimizer has replaced is freed, while lists still have their item."""
        self._pieces, self.others = [], ()


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the same bytes of the host, as a storage of their own: `torch.save` refuses several types in one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    size_bytes = (last + 1) * tensor.element_size()
    first = int(tensor.storage_offset()) * tensor.element_size()
    with unseen(), torch.no_grad():
        region = torch.frombuffer(bytes_of(tensor)[first : first + size_bytes].numpy(), dtype=torch.uint8)
        return view_of(region, tensor.dtype, tuple(tensor.size()), tensor.stride(), 0)


def _storage_of(tensor: torch.Tensor) -> int:
    with untouched():
        return storage_of(tensor)
