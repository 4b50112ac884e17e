"""Gradient clipping of a loop, and other changes of gradients, recorded to repeat them on the mean
gradient of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

Clip = Callable[[], object]


@dataclass(frozen=True)
class _Clipped:
    """A clipped gradient: its values before, and the tensor with its version after.

    torch counts in-place changes of a tensor as versions.
    """

    before: Tensor
    after: Tensor
    version: int

    def is_unchanged(self, gradient: Tensor | None) -> bool:
        return gradient is self.after and self.after._version == self.version


class LoopClips:
    """Records clipping calls between the computation of gradients and the step that uses them."""

    def __init__(self) -> None:
        self._clipped: dict[Tensor, _Clipped] = {}
        #: Parameters, and what clips their gradients again.
        self._calls: list[tuple[set[Tensor], Clip]] = []
        #: Gradients before code of the loop changes them, and what makes those changes again.
        self._computed: dict[Tensor, Tensor] = {}
        self._changes: Callable[[], Clip] | None = None
        self._clips_follow = False
        #: Returns the factor of the gradients that were computed last.
        self.scale: Callable[[], float] = lambda: 1.0

    def expect(
        self,
        parameters: Iterable[Tensor],
        changes: Callable[[], Clip] | None,
        *,
        clips_follow: bool = False,
    ) -> None:
        """Note the gradients of parameters before the loop changes them, without their scale.

        ``changes()`` returns what makes the changes again with the present variables. With
        ``clips_follow``, the calls that clip are made after them; otherwise, they are among them.
        """
        self._changes, self._clips_follow = changes, clips_follow
        self._computed = {}
        if changes is not None:
            scale, found = self.scale(), [(each, each.grad) for each in parameters]
            self._computed = {each: grad / scale for each, grad in found if grad is not None}

    def clip(self, parameters: Iterable[Tensor], now: Clip, again: Clip) -> None:
        """Clip gradients of the local batch by ``now()``.

        ``again()`` clips the gradients that the parameters have then.
        """
        found = [each for each in parameters if each.grad is not None]
        before = {}
        for each in found:
            assert each.grad is not None
            known = self._clipped.pop(each, None)
            clipped = known is not None and known.is_unchanged(each.grad)
            before[each] = known.before if known and clipped else each.grad.detach().clone()
            if known is not None and not clipped:
                # A further backward has added to it, so the first call can't be made again.
                self._calls = [call for call in self._calls if each not in call[0]]
        now()
        for each in found:
            assert each.grad is not None
            self._clipped[each] = _Clipped(before[each], each.grad, each.grad._version)
        self._calls.append((set(found), again))

    def forget(self) -> None:
        """Forget all calls, because the step isn't made again."""
        self._clipped, self._calls = {}, []
        self.expect((), None)

    def take(self, parameters: Iterable[Tensor]) -> tuple[dict[Tensor, Tensor], list[Clip]]:
        """Return the gradients before clipping of parameters that make a step, and their calls.

        Both are empty if the loop has changed the gradients since.
        """
        owned = set(parameters)
        found = {each: self._clipped.pop(each) for each in owned & self._clipped.keys()}
        calls = [call for call in self._calls if call[0] & owned]
        self._calls = [call for call in self._calls if not call[0] & owned]
        computed = {each: self._computed.pop(each) for each in owned & self._computed.keys()}
        if computed:
            changes, self._changes = self._changes, None
            made = [changes()] if changes is not None else []
            return computed, [*made, *(c for _, c in calls if self._clips_follow)]
        if not all(clipped.is_unchanged(each.grad) for each, clipped in found.items()):
            return {}, []
        return {each: clipped.before for each, clipped in found.items()}, [c for _, c in calls]
