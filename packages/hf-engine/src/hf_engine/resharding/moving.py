"""Place of the training shard while the engine generates: inside the generation shard, not in addition to it.

A parameter's training storage is emptied as soon as its contents are in the generation buffer and have been sent. On
the way back it is filled again from there: the same bits, and during generation no second copy (paper, section 5.4:
redundancy 0). On the way a parameter is there twice while it is copied, because storages can only be freed whole; how
many bytes are live then is computed beforehand. What lies outside the generation shard, where layouts do not nest,
waits in a copy on the host. A parameter of which the rank holds the same box in both layouts need not move: an engine
that can compute with another's tensors is lent the training tensor until the way back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from weakref import WeakSet

import torch

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.plan import ReshardPlan
from hf_engine.resharding.steps import Region, RegionViews, locate
from hf_engine.resharding.tensor_checks import check_resizable

__all__ = ["ShardMover", "hold_training_weights", "storage_bytes"]

_Tensors = Mapping[str, Sequence[torch.Tensor]]
_Boxes = Mapping[str, tuple[Box, ...]]

_MOVERS: WeakSet[ShardMover] = WeakSet()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Live bytes of the tensors' storages, each counted once."""
    return sum(storage.nbytes() for storage in _storages(tensors).values())


def hold_training_weights(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns True if training weights were moved into these generation tensors and are not back yet."""
    movers = [mover for mover in _MOVERS if mover.has_moved]
    keys = {tensor.untyped_storage()._cdata for tensor in tensors} if movers else set()
    return any(mover.has_moved_into(keys) for mover in movers)


class ShardMover:
    """Empties one rank's training storages, and generation storages, when their contents are elsewhere.

    Args:
        plan: training layout to generation layout.
        rank: this rank.
        train: its training tensors; their storages must be resizable.
        generation: its generation tensors; those that share a storage are freed together.
        adopt: puts tensors in the place of the engine's own, by name, where training tensors may be lent to it.
        padding: training tensors that hold nothing: their storages are emptied first, and come back last, as zeros.

    Raises:
        ReshardError: for memory that would have to be freed and cannot be.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        train: _Tensors,
        generation: _Tensors,
        *,
        adopt: Callable[[Mapping[str, torch.Tensor]], object] | None = None,
        padding: Sequence[torch.Tensor] = (),
    ) -> None:
        self._train, self._generation = train, generation
        self.held, self.wanted = RegionViews(train), RegionViews(generation)
        held, wanted = plan.source.boxes_of(rank), plan.target.boxes_of(rank)
        self._kept: dict[str, list[tuple[Region, Region]]] = defaultdict(list)
        kept_numel: dict[str, int] = defaultdict(int)
        for name, box in plan.kept.get(rank, ()):
            self._kept[name].append((locate(wanted, name, box), locate(held, name, box)))
            kept_numel[name] += box.numel
        groups = _storage_groups(train)
        # Storages of generation: what is in each, and which a parameter is in.
        self._homes = _storage_groups(generation)
        self._home_storages = _storages(tensor for tensors in generation.values() for tensor in tensors)
        self._homes_of: dict[str, list[int]] = defaultdict(list)
        for home, names in self._homes.items():
            for name in names:
                self._homes_of[name].append(home)
        self._adopt = adopt
        alike = [names for names in groups.values() if adopt and self._are_alike(names, held, wanted)]
        # By name, what is lent with it: all that shares its storage.
        loans = [{name: train[name][0] for name in names} for names in alike]
        self._loans = {name: together for together in loans for name in together}
        self._lent: dict[str, torch.Tensor] = {}
        self._groups = {key: names for key, names in groups.items() if self._loans.keys().isdisjoint(names)}
        check_resizable(_filled(train, but=self._loans), "the training weights")
        check_resizable(_filled(generation), "weight_buffers()")
        check_resizable({"padding()": padding}, "the training backend")
        self._storages = _storages(tensor for tensors in train.values() for tensor in tensors)
        self._storages_of: dict[str, list[int]] = defaultdict(list)
        for key, names in self._groups.items():
            for name in names:
                self._storages_of[name].append(key)
        inside = {name for name, boxes in held.items() if kept_numel[name] == sum(box.numel for box in boxes)}
        self._waiting = {
            key: self._find_gaps(key, names) if names <= inside else [slice(0, self._storages[key].nbytes())]
            for key, names in self._groups.items()
        }
        self._padding = [(each, each.nbytes()) for key, each in _storages(padding).items() if key not in groups]
        self._lacks_padding = False
        self._home_bytes = {home: self._home_storages[home].nbytes() for home in self._homes}
        self._train_bytes = {key: self._storages[key].nbytes() for key in self._groups}
        self._way_back = self._order_back(self._groups)
        self._done: set[str] = set()
        self._emptied: set[int] = set()
        self._copies: dict[int, list[torch.Tensor]] = {}
        _MOVERS.add(self)

    @property
    def host_bytes(self) -> int:
        """Bytes that wait on the host during generation: storages that do not lie inside the generation shard, and of
        the others what is not a parameter's, padding say.

        Their copies are allocated in the first transition and kept.
        """
        return sum(part.stop - part.start for parts in self._waiting.values() for part in parts)

    def peak_bytes(self, order: Iterable[tuple[Sequence[str], Sequence[str]]]) -> int:
        """The most bytes of training and generation weights that are live at once, there and back. Pure.

        Args:
            order: of the calls on the way there: the parameters to `prepare`, and those to `empty` after them.
        """
        lent = storage_bytes(together[name] for name, together in self._loans.items())
        live = sum(self._train_bytes.values()) + lent
        peak = live + sum(size for _, size in self._padding)
        taken: set[int] = set()
        finished: set[str] = set()
        for prepared, done in order:
            homes = {home for name in prepared if name not in self._loans for home in self._homes_of[name]} - taken
            taken |= homes
            live += self._bytes_of_homes(homes)
            peak = max(peak, live)
            live -= sum(self._train_bytes[key] for key in self._finish(done, finished))
        unneeded, way_back = self._way_back
        live -= self._bytes_of_homes(taken.intersection(unneeded))
        for key, freed in way_back:
            live += self._train_bytes[key]
            peak = max(peak, live)
            live -= self._bytes_of_homes(freed)
        return peak

    def lend(self, names: Iterable[str]) -> None:
        """Lends the engine these parameters in one call, where it can use the training tensors.

        All that shares a storage goes along.
        """
        loans: dict[str, torch.Tensor] = {}
        for name in names:
            if name in self._loans and name not in self._lent and name not in loans:
                loans |= self._loans[name]
        if self._adopt is not None and loans:
            self._lent.update(loans)
            self._adopt(loans)

    def prepare(self, names: Sequence[str]) -> None:
        """Allocates the generation tensors of these parameters and copies what the rank holds already, or lends it."""
        if not self._lacks_padding:
            self._lacks_padding = True
            for storage, _ in self._padding:
                storage.resize_(0)
        self.lend(names)
        for name in names:
            if name in self._loans:
                continue
            for home in self._homes_of[name]:
                if not self._home_storages[home].nbytes():
                    self._home_storages[home].resize_(self._home_bytes[home])
            for destination, origin in self._kept[name]:
                self.wanted.at(destination).copy_(self.held.at(origin))

    @torch.inference_mode(False)  # copies are written again outside of that mode
    def empty(self, names: Iterable[str]) -> None:
        """Empties the training storages whose parameters have all been kept and sent."""
        for key in self._finish(names, self._done):
            storage = self._storages[key]
            waiting = self._waiting[key]
            if key not in self._copies:
                self._copies[key] = [torch.empty(part.stop - part.start, dtype=torch.uint8) for part in waiting]
            for part, copy in zip(waiting, self._copies[key], strict=True):
                copy.copy_(_bytes_of(storage)[part])
            self._emptied.add(key)
            storage.resize_(0)

    def is_built_on(self, train: _Tensors, generation: _Tensors) -> bool:
        """Returns True if these are the tensors that it moves, or other views of their memory."""
        pairs = ((train, self._train), (generation, self._generation))
        return all(_list_storages(given) == _list_storages(own) for given, own in pairs)

    @property
    def has_moved(self) -> bool:
        """Returns True if an engine has the only copy of some training weights."""
        return bool(self._lent or self._emptied)

    def has_moved_into(self, keys: Set[int]) -> bool:
        """Returns True if any of these storages holds the only copy of training weights, and an engine has it."""
        if not keys.isdisjoint(tensor.untyped_storage()._cdata for tensor in self._lent.values()):
            return True
        return bool(self._emptied) and not keys.isdisjoint(self._home_storages)

    def restore(self) -> None:
        """Takes back what was lent, fills the other training storages again, and empties the generation tensors."""
        if self._adopt is not None:
            self._adopt({name: self._generation[name][0] for name in self._lent})
        self._lent.clear()
        # A transition that stopped in the middle goes back from its present state: there may be no other room.
        is_whole = len(self._emptied) == len(self._groups)
        unneeded, way_back = self._way_back if is_whole else self._order_back(self._emptied)
        self._empty_homes(unneeded)
        for key, done in way_back:
            self._refill(key, self._groups[key])
            self._empty_homes(done)
        if self._lacks_padding:
            for storage, size in self._padding:
                storage.resize_(size)
                _bytes_of(storage).zero_()
            self._lacks_padding = False
        self._done.clear()

    def _finish(self, names: Iterable[str], done: set[str]) -> list[int]:
        """Adds parameters to those that are done; returns the training storages that become complete."""
        new = [name for name in names if name not in done]
        done.update(new)
        keys = dict.fromkeys(key for name in new for key in self._storages_of[name])
        return [key for key in keys if self._groups[key] <= done]

    def _order_back(self, keys: Container[int]) -> tuple[list[int], list[tuple[int, list[int]]]]:
        """Returns the generation storages that hold nothing of these training storages. Then these training storages,
        each with the generation storages that are not needed after it. Small ones come first: the memory that they free
        makes room for large ones.
        """
        order = sorted((key for key in self._groups if key in keys), key=self._train_bytes.__getitem__)
        done = {home: key for key in order for name in self._groups[key] for home in self._homes_of[name]}
        freed: dict[int, list[int]] = defaultdict(list)
        for home, key in done.items():
            freed[key].append(home)
        return [home for home in self._homes if home not in done], [(key, freed[key]) for key in order]

    def _refill(self, key: int, names: set[str]) -> None:
        storage = self._storages[key]
        storage.resize_(self._train_bytes[key])
        self._emptied.remove(key)
        for part, copy in zip(self._waiting[key], self._copies[key], strict=True):
            _bytes_of(storage)[part].copy_(copy)
        for name in names:
            for inside, destination in self._kept[name]:
                # Another part may lie in a storage that is still empty; torch makes no view of such a storage.
                if self._train[name][destination.part].untyped_storage()._cdata == key:
                    self.held.at(destination).copy_(self.wanted.at(inside))

    def _empty_homes(self, homes: Iterable[int]) -> None:
        for home in homes:
            self._home_storages[home].resize_(0)

    def _are_alike(self, names: set[str], held: _Boxes, wanted: _Boxes) -> bool:
        """Returns True if an engine's kernels can use a training storage of these parameters like the engine's own."""
        homes = {home for name in names for home in self._homes_of[name]}
        if len(homes) != 1 or self._homes[homes.pop()] != names:
            return False
        for name in names:
            tensors = [*self._generation[name], *self._train[name]]
            kinds = {(each.dtype, each.device, each.shape, each.stride(), each.storage_offset()) for each in tensors}
            # Several boxes, or what the transfer will refuse.
            if held[name] != wanted.get(name) or len(tensors) != 2 or len(kinds) > 1:
                return False
        views = [self._train[name][0] for name in names]
        return sum(view.nbytes for view in views) == storage_bytes(views)

    def _bytes_of_homes(self, homes: Iterable[int]) -> int:
        return sum(self._home_bytes[home] for home in homes)

    def _find_gaps(self, key: int, names: set[str]) -> list[slice]:
        """Bytes of a storage in which none of its parameters lies; all of it where they cannot be distinguished."""
        size = self._storages[key].nbytes()
        views = [t for name in names for t in self._train[name] if t.untyped_storage()._cdata == key]
        if sum(view.nbytes for view in views) == size:
            return []
        starts = sorted((view.storage_offset() * view.element_size(), view.nbytes) for view in views)
        ends = [0, *(start + length for start, length in starts)]
        gaps = [slice(end, start) for end, (start, _) in zip(ends, [*starts, (size, 0)], strict=True)]
        if not all(view.is_contiguous() for view in views) or any(gap.stop < gap.start for gap in gaps):
            return [slice(0, size)]
        return [gap for gap in gaps if gap.stop > gap.start]


def _list_storages(tensors: _Tensors) -> dict[str, list[int]]:
    return {name: [part.untyped_storage()._cdata for part in parts] for name, parts in tensors.items()}


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


def _filled(tensors: _Tensors, *, but: Container[str] = ()) -> dict[str, list[torch.Tensor]]:
    return {name: [part for part in parts if part.numel()] for name, parts in tensors.items() if name not in but}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_groups(tensors: _Tensors) -> dict[int, set[str]]:
    """The parameters that live in each storage; a fused projection holds several."""
    groups: dict[int, set[str]] = defaultdict(set)
    for name, parts in tensors.items():
        for tensor in parts:
            if tensor.numel():
                groups[tensor.untyped_storage()._cdata].add(name)
    return dict(groups)
