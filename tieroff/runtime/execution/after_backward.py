"""What happens when a backward ends and user code runs again."""

from __future__ import annotations

from tieroff.core.tensor import TensorClass
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.items.homes import HomeItem


class AfterBackward:
    """Makes parameters, gradients and optimizer state safe for user code.

    User code may write them in ways that no version shows. So a moved one lies below from here on, where writes count, or it
    stays on the device for the update and counts as written. State that was brought up ahead of the update does the latter.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context

    def backward_ended(self) -> None:
        """User code runs next."""
        context = self._context
        if context.state.record.recorder is not None:
            context.state.record.recorder.backward_ended()
        context.on_demand.release_reachable()
        for gradient in context.homes.gradients.values():
            if gradient.device is not None and self._leaves(gradient):
                gradient.leave(context.traffic)
                context.state.record.bind(gradient)
        # Right before the update a copy that nobody lifted leaves too: the home below may be written.
        is_last = context.runner.is_before_update
        for item in context.runner.movable(context.homes):
            if item.kind is TensorClass.PARAMETER and (item.is_lifted or is_last) and self._leaves(item):
                item.leave(context.traffic)
            elif item.kind is TensorClass.OPTIMIZER and not item.is_lifted and item.is_shown_below:
                item.refresh(context.traffic)
                item.lift(context.traffic)
                item.touch(context.traffic)
        context.guard.pass_ended()

    def _leaves(self, item: HomeItem) -> bool:
        runner = self._context.runner
        return not runner.keeps(item) and not runner.stays_for_update(item)
