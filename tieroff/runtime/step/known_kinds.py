"""The kinds of steps that ran."""

from __future__ import annotations

import logging
from collections import OrderedDict

from tieroff.runtime.step.kinds import Measuring, Planned, Recording, StepKind, Unplanned
from tieroff.runtime.step.likeness import Signature, is_within, structure_of

log = logging.getLogger("tieroff")

# Kinds of steps (signatures) whose traces and plans are kept.
_KINDS_KEPT = 16
# Steps that a kind runs on demand before a plan of its own is worth a trace, if others say what its ops need.
_FORESEEN_STEPS = 4
# Steps with smaller inputs that are taken for a kind's although they turn out to be others.
_STRANGERS_AT_MOST = 2
# Steps in a row that must leave a plan before the kind is traced again; doubled each time.
_MISMATCHES_BEFORE_RETRACE = 2


class KnownKinds(OrderedDict[Signature, StepKind]):
    """The kinds of steps that ran, by signature; the one that ran last is at the end.

    The last part of a signature is what the step finds as it begins: see [Note: contents] in lifecycle/contents.py.
    """

    def enter(self, signature: Signature, *, is_covered: bool, is_passed_through: bool) -> StepKind:
        """Returns the kind of a step that begins, in the stage that this step is for.

        Args:
            signature: of the step.
            is_covered: inputs at least as large were traced, so it is known what the ops of this step need.
            is_passed_through: gradients flow through it to another model.
        """
        kind = self._enter(signature, is_covered=is_covered, is_passed_through=is_passed_through)
        turn = kind.turns.next()
        if turn is None or (
            kind.recorded is not None and kind.recorded.likeness == turn and not isinstance(kind.stage, Unplanned)
        ):
            return kind
        in_turn = self._enter((*signature, turn), is_covered=False, is_passed_through=is_passed_through)
        in_turn.turn, in_turn.turns = turn, kind.turns
        return in_turn

    def _enter(self, signature: Signature, *, is_covered: bool, is_passed_through: bool) -> StepKind:
        kind = self.serving(signature)
        if kind is not None and signature not in self:
            self.move_to_end(self._name_of(kind))
            return kind
        if kind is None:
            kind = StepKind(is_passed_through=is_passed_through)
            before = self._unrepeated(signature)
            if before is not None and isinstance(before.stage, Unplanned):
                kind.advance(Unplanned())
                kind.retraces = before.retraces
            elif is_covered and self._has_traced_like(signature):
                kind.advance(Unplanned())
                kind.foreseen = _FORESEEN_STEPS
            elif len(self) >= _KINDS_KEPT:
                kind.advance(Unplanned())  # of so many kinds, only one that comes again soon is worth a trace
            elif before is not None:
                kind.retraces = before.retraces
            self[signature] = kind
            if len(self) > _KINDS_KEPT:
                self.popitem(last=False)
        elif isinstance(kind.stage, Unplanned) and not kind.retraces and not kind.foreseen:
            kind.advance(Recording())
        kind.foreseen = max(kind.foreseen - 1, 0)
        self.move_to_end(signature)
        if isinstance(kind.stage, Planned) and kind.mismatches >= _MISMATCHES_BEFORE_RETRACE << kind.retraces:
            log.info("the step has left its plan %d times in a row: it is traced again", kind.mismatches)
            kind.advance(Recording())
            kind.retraces += 1
            kind.mismatches = 0
        return kind

    def serving(self, signature: Signature) -> StepKind | None:
        """Returns the kind of a step: its own, or one that is planned, or about to be, for larger inputs and else the same.

        What a plan moves, and when, is right for smaller tensors too, and they take no more memory.
        """
        own = self.get(signature)
        if own is not None:
            return own
        measuring = None
        for known, kind in reversed(self.items()):
            is_ready = isinstance(kind.stage, Planned | Measuring) and kind.strangers < _STRANGERS_AT_MOST
            if is_ready and is_within(signature, known):
                if isinstance(kind.stage, Planned):
                    return kind
                measuring = measuring or kind
        return measuring

    def _unrepeated(self, signature: Signature) -> StepKind | None:
        """Returns the last kind that found something else as it began, and has no plan, or left it: they may never repeat."""
        known = (kind for other, kind in reversed(self.items()) if other[:-1] == signature[:-1])
        kind = next(known, None)
        return kind if kind is not None and not kind.foreseen and (kind.planned is None or kind.mismatches) else None

    def rename(self, kind: StepKind, signature: Signature) -> None:
        """A kind is of steps of this signature from here on, in its turn if it has one, unless others are known of it."""
        signature = signature if kind.turn is None else (*signature, kind.turn)
        if signature not in self:
            del self[self._name_of(kind)]
            self[signature] = kind

    def _name_of(self, kind: StepKind) -> Signature:
        return next(signature for signature, known in self.items() if known is kind)

    def _has_traced_like(self, signature: Signature) -> bool:
        """Returns whether a kind was traced that differs from this one in sizes only."""
        structure = structure_of(signature)
        return any(kind.recorded is not None and structure_of(known) == structure for known, kind in self.items())
