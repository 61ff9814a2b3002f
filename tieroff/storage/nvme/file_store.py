"""Drives: one nameless file per directory, extents in it, and homes mapped on extents."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast
from weakref import WeakSet

from tieroff.core.tensor import Tier
from tieroff.errors import ConfigError, StateError, StoreError
from tieroff.storage.engines.base import Engine, Mover, OpenFile, Transfer
from tieroff.storage.extents import FreeList
from tieroff.storage.homes import place_home
from tieroff.storage.memory import PAGE_BYTES, Mapping, SpareMappings, align_up, write_back
from tieroff.storage.nvme import files
from tieroff.storage.nvme.file_home import FileHome, MappedExtents
from tieroff.storage.nvme.pages import PageReturner, return_pages
from tieroff.storage.nvme.shares import share_out
from tieroff.storage.space import SpaceStore
from tieroff.storage.store import Block, By
from tieroff.storage.transfers import UNCHECKED, Check, StoreTransfer
from tieroff.units import format_bytes

Checksum = Literal["off", "warmup", "always"]

GROW_BYTES = 256 * 2**20
"""The least by which a file grows when nothing was reserved."""

MIN_FREE_BYTES = 64 * 2**20
"""What a directory must have free beyond the capacity."""

_ADDRESS_SPACE_SHARE = 4
"""Address space for homes, in capacities: it costs nothing, and keeps holes between homes from mattering."""

_SPARE_MAPPINGS = 16


@dataclass(frozen=True, slots=True)
class Room:
    """How a store takes room on its drives.

    Attributes:
        min_free_bytes: what must stay free on each drive beyond the capacity.
        grow_bytes: the least by which a file grows at once.
        opener: makes the files.
    """

    min_free_bytes: int = MIN_FREE_BYTES
    grow_bytes: int = GROW_BYTES
    opener: files.Opener = os.open


ROOM = Room()


class FileStore(SpaceStore):
    """Tier NVME. Whole extents are spread over the directories; the one that is emptiest for its share is taken first.

    Attributes:
        dirs: as given.
        files: open, one per directory.
        is_direct: whether every file is open with O_DIRECT; if not, bytes also lie in the page cache.
        page_returner: what `return_pages` started, or None.
    """

    tier = Tier.NVME

    def __init__(
        self,
        dirs: Sequence[str | os.PathLike[str]],
        capacity_bytes: int,
        engine: Engine,
        checksum: Checksum = "warmup",
        *,
        write_bytes_per_s: Sequence[float] | None = None,
        room: Room = ROOM,
    ) -> None:
        """Opens one file per directory; takes no room on the drives yet (see reserve).

        Args:
            dirs: existing directories, at least one.
            capacity_bytes: hard limit on extents, padding included, shared out over the directories.
            engine: moves the bytes; the caller closes it after the store.
            checksum: "always", "warmup" (until end_warmup()) or "off". Blocks are compared when they are read. Homes, which
                user code may change, are compared when they are published, by reading the new value back, and when they are
                read; two equal reads count as a change by user code. With "off", and after the warm-up, bytes that a drive
                changes without an error go unnoticed.
            write_bytes_per_s: write speed of each directory; they fill in this proportion. None: equally. A directory with too
                little room for its share takes less, and the others more.
            room: how it takes room on the drives.

        Raises:
            ConfigError: a directory cannot be used, or the drives are too small.
            StoreError: a file could not be made.
        """
        if checksum not in ("off", "warmup", "always"):
            raise ConfigError(f"[nvme] checksum: expected off, warmup or always, got {checksum!r}")
        self.dirs = [os.fspath(path) for path in dirs]
        if not self.dirs:
            raise ConfigError("[nvme] dirs: expected at least one directory, got none")
        speeds = write_bytes_per_s or [1.0] * len(self.dirs)
        self.files, shares = _open_files(self.dirs, capacity_bytes, speeds, engine.is_direct, room)
        try:
            super().__init__(capacity_bytes, engine, max(file.block_bytes for file in self.files))
        except BaseException:
            _close_files(self.files)
            raise
        self.is_direct = all(file.is_direct for file in self.files)
        self._checksum = checksum
        self._is_checking = checksum != "off"
        self._grow_bytes = align_up(room.grow_bytes, self.alignment_bytes)
        self._shares = [align_up(max(share, 1), self.alignment_bytes) for share in shares]
        self.areas = [FreeList() for _file in self.files]
        self._home_types: dict[int, Any] = {}
        self._addresses = FreeList()
        self._mapped: WeakSet[MappedExtents] = WeakSet()  # those whose range of addresses is taken
        self._range: Mapping | None = None
        self._spare: SpareMappings | None = None
        self._switching: MappedExtents | None = None  # its memory may show the shadow already
        self.page_returner: PageReturner | None = None
        _open_stores.add(self)

    def end_warmup(self) -> None:
        """Ends checking under checksum "warmup"."""
        self._is_checking = self._checksum == "always"

    def reserve(self, size_bytes: int) -> None:
        """Grows the files to this many bytes in all, by their shares, so that a full drive shows now.

        Raises:
            StateError: more than the capacity.
            StoreError: a drive is full.
        """
        with self._open():
            if size_bytes > align_up(self.capacity_bytes, self.alignment_bytes):
                raise StateError(f"expected to reserve at most {self.capacity_bytes} bytes, got {size_bytes}")
            for index, (area, share) in enumerate(zip(self.areas, self._shares, strict=True)):
                wanted = min(align_up(-(-size_bytes * share // self.capacity_bytes), self.alignment_bytes), share)
                if wanted > area.length_bytes:
                    self._extend(index, wanted - area.length_bytes)

    def return_pages(self, interval_s: float | None) -> None:
        """Keeps the homes' pages from staying resident: a thread gives them back every so often.

        Args:
            interval_s: time between two rounds, such as 0.005; None stops it.
        """
        with self._open():
            if self.page_returner is not None:
                self.page_returner.close()
                self.page_returner = None
            if interval_s is not None:
                space = self._address_range()
                self.page_returner = return_pages(space.address, space.size_bytes, interval_s)

    def give_back(self, address: int, size_bytes: int) -> None:
        """Drops pages of the homes in a range of addresses from this process; values stay. It may lie anywhere else, too."""
        space = self._range
        if space is not None and space.address <= address < space.address + space.size_bytes:
            start = (address - space.address) // PAGE_BYTES * PAGE_BYTES
            stop = min(align_up(address - space.address + size_bytes, PAGE_BYTES), space.size_bytes)
            space.give_back(start, stop - start)

    def home(self, size_bytes: int) -> FileHome:
        """Returns a new home: a mapped extent."""
        block = self.allocate(size_bytes)
        with self._open():
            block.is_home = True
            try:
                place = self._map_new(block)
            except BaseException:
                block.is_freed = True
                self._freed.append(block)
                raise
            home = cast(FileHome, place_home(FileHome, size_bytes, place.address, self._home_types))
            home.store = self
            home.place = place
        self._free_with(home, place)
        return home

    # For homes.

    def verify(self, place: MappedExtents) -> None:
        """While checksums are on: reads a home's new value back, because user code may change it later.

        Raises:
            StoreError: the drive holds other bytes than were written.
        """
        with self._open():
            shadow = place.shadow
            written = shadow.written if shadow is not None else None
            if shadow is None or not isinstance(written, StoreTransfer) or written.checksum is None:
                return
            transfer = self.engine.verify(self.files[shadow.area], shadow.offset, shadow.size_bytes)
            check = self._started(shadow, transfer, "read back", place.space, Check(written.checksum))
        check.wait()

    def switch(self, place: MappedExtents) -> None:
        """Maps the home's memory onto its shadow extent and frees the extent that it showed before."""
        with self._open():
            shadow = place.shadow
            if shadow is None:
                raise StateError("expected a written value to publish, got none")
            self._switching = place
            self._show(place, shadow)
            old, place.shown, place.shadow = place.shown, shadow, None
            self._switching = None
            self._forget_pages(old)
            old.is_freed = True
            self._freed.append(old)
            self._drain()

    def _show(self, place: MappedExtents, block: Block) -> None:
        with self._placed("map", block):
            place.space.map_file(place.position, block.extent_bytes, self.files[block.area].fd, block.offset)

    def _home_check(self, block: Block, target_address: int, by: By | None) -> Check:
        written = block.written
        if not self._is_checking or not isinstance(written, StoreTransfer) or not written.has_succeeded():
            return UNCHECKED
        return Check(written.checksum, functools.partial(self._submit_read, block, target_address, by))

    def trim(self, place: MappedExtents) -> None:
        """Drops the pages of a home from memory and page cache.

        Raises:
            StoreError: the drive did not take changed pages.
        """
        with self._open():
            block = place.shown
            fd = self.files[block.area].fd
        with self._placed("write back", block):
            place.space.give_back(place.position, block.extent_bytes)
            write_back(fd, block.offset, block.extent_bytes)
        self._forget_pages(block)

    @contextmanager
    def _placed(self, action: str, block: Block) -> Iterator[None]:
        """Turns an error of the system into one that names the place."""
        try:
            yield
        except OSError as error:
            path, offset = self._place(block)
            hint = "; vm.max_map_count may be too low, each home is a mapping" if error.errno == errno.ENOMEM else ""
            raise StoreError(
                f"cannot {action} {block.size_bytes} bytes of {path} at offset {offset}: {error}{hint}",
                path=path,
                offset=offset,
                size_bytes=block.size_bytes,
                errno=error.errno,
            ) from error

    def _forget_pages(self, block: Block) -> None:
        os.posix_fadvise(self.files[block.area].fd, block.offset, block.extent_bytes, os.POSIX_FADV_DONTNEED)

    def _address_range(self) -> Mapping:
        if self._range is None:
            size_bytes = align_up(self.capacity_bytes * _ADDRESS_SPACE_SHARE, self.alignment_bytes)
            self._range = Mapping(size_bytes, is_reserved=True)
            self._addresses.extend(size_bytes)
        if self._spare is None:
            self._spare = SpareMappings(_SPARE_MAPPINGS)
        return self._range

    def _map_new(self, block: Block) -> MappedExtents:
        with self._placed("map", block):
            space = self._address_range()
        position = self._addresses.take(block.extent_bytes)
        if position is None:
            raise StoreError(
                f"no address space left for a home of {block.size_bytes} bytes: too many homes are alive",
                size_bytes=block.size_bytes,
            )
        try:
            with self._placed("map", block):
                space.map_file(position, block.extent_bytes, self.files[block.area].fd, block.offset)
        except BaseException:
            self._addresses.give(position, block.extent_bytes)
            raise
        mapped = MappedExtents(space, position, block)
        self._mapped.add(mapped)
        return mapped

    def _dissolve(self, item: Any) -> list[Block]:
        if not isinstance(item, MappedExtents):
            return [item]
        self._unmap(item)
        self._addresses.give(item.position, item.shown.extent_bytes)
        self._mapped.discard(item)
        return self._blocks_in(item)

    def _unmap(self, place: MappedExtents) -> None:
        size_bytes = place.shown.extent_bytes
        try:
            place.space.unmap_file(place.position, size_bytes)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            self._spare = None  # the process has as many mappings as it may: now a few less
            try:
                place.space.unmap_file(place.position, size_bytes)
            except OSError:
                place.space.give_back(place.position, size_bytes)  # it is mapped over when these addresses are next used

    def _recount(self) -> None:
        place, self._switching = self._switching, None
        if place is not None and place in self._mapped and place.shadow is not None:
            self._show(place, place.shown)
        broken_off = self._dissolving
        if isinstance(broken_off, MappedExtents):
            self._unmap(broken_off)  # once more does no harm
            self._mapped.discard(broken_off)
        super()._recount()
        self._addresses.rebuild((mapped.position, mapped.shown.extent_bytes) for mapped in list(self._mapped))

    def _blocks_in(self, item: Any) -> list[Block]:
        if not isinstance(item, MappedExtents):
            return [item]
        return [item.shown] if item.shadow is None else [item.shown, item.shadow]

    # Room.

    def _area_order(self) -> list[int]:
        # The one that is emptiest for its share first, growing it if need be: so slow drives get less to do.
        return sorted(range(len(self.areas)), key=lambda index: self.areas[index].used_bytes / self._shares[index])

    def _grow(self, extent_bytes: int) -> str:
        reason = "the free room is in pieces"
        for index in self._area_order():
            area = self.areas[index]
            needed = extent_bytes - area.tail_bytes
            left = self._shares[index] - area.length_bytes
            if needed > left:
                continue
            try:
                self._extend(index, min(max(needed, self._grow_bytes), left))
            except StoreError as error:
                reason = str(error)
                continue
            return ""
        return reason

    def _extend(self, index: int, size_bytes: int) -> None:
        file, area = self.files[index], self.areas[index]
        try:
            files.preallocate(file, area.length_bytes, size_bytes)
        except OSError as error:
            raise StoreError(
                f"cannot reserve {format_bytes(size_bytes)} more in {file.path}: {os.strerror(error.errno or 0)}; "
                "free some space there, or lower [budget] nvme",
                path=file.path,
                offset=area.length_bytes,
                size_bytes=size_bytes,
                errno=error.errno,
            ) from error
        area.extend(size_bytes)

    # Transfers.

    def _submit_write(self, block: Block, source_address: int, by: By | None) -> Transfer:
        return self._mover(by).write(
            self.files[block.area], block.offset, source_address, block.size_bytes, with_checksum=self._is_checking
        )

    def _mover(self, by: By | None) -> Mover:
        return self.engine if by is None else by(self.engine)

    def _submit_read(self, block: Block, target_address: int, by: By | None) -> Transfer:
        return self._mover(by).read(
            self.files[block.area],
            block.offset,
            target_address,
            block.size_bytes,
            with_checksum=self._is_checking,
            is_mapped=block.is_home,
        )

    def _place(self, block: Block) -> tuple[str, int]:
        return self.dirs[block.area], block.offset

    def _where(self) -> tuple[str, int]:
        return ", ".join(self.dirs), 0

    def _release(self) -> None:
        if self.page_returner is not None:
            self.page_returner.close()
            self.page_returner = None
        self._spare = None
        self._range = None  # homes that are still referred to hold it, and their mappings hold the file's bytes
        _close_files(self.files)
        self.files = []
        self.areas = []

    def _close_in_child(self) -> None:
        """After a fork: the child has nothing but copies of the descriptors."""
        _close_files(self.files)
        self.files = []


def _open_files(
    dirs: Sequence[str], capacity_bytes: int, speeds: Sequence[float], is_direct: bool, room: Room
) -> tuple[list[OpenFile], list[int]]:
    """Checks all directories before it makes a file in any; returns the files, and the bytes that each may take."""
    directory_fds: list[int] = []
    opened: list[OpenFile] = []
    try:
        for path in dirs:
            directory_fds.append(files.open_directory(path))
        shares = share_out(capacity_bytes, speeds, files.rooms(directory_fds, room.min_free_bytes))
        if sum(shares) < capacity_bytes:
            raise ConfigError(
                f"expected room for {format_bytes(capacity_bytes)} under [nvme] dirs ({', '.join(dirs)}), got "
                f"{format_bytes(sum(shares))}; {format_bytes(capacity_bytes + room.min_free_bytes)} are needed, "
                f"{format_bytes(room.min_free_bytes)} of them to stay free on each drive: free some, or lower [budget] nvme"
            )
        for path, directory_fd in zip(dirs, directory_fds, strict=True):
            opened.append(files.open_nameless(path, directory_fd, is_direct=is_direct, opener=room.opener))
    except BaseException:
        _close_files(opened)
        raise
    finally:
        for directory_fd in directory_fds:
            os.close(directory_fd)
    return opened, shares


def _close_files(opened: Sequence[OpenFile]) -> None:
    for file in opened:
        os.close(file.fd)


_open_stores: WeakSet[FileStore] = WeakSet()


def _close_all_in_child() -> None:
    for store in list(_open_stores):
        store._close_in_child()


# The interpreter keeps such calls until it exits, so there is one for all stores.
os.register_at_fork(after_in_child=_close_all_in_child)
