"""Detects the end of a training step with several optimizers, such as Muon for matrices and AdamW for the rest."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer


class OptimizerSteps:
    """Calls a function when all of a model's optimizers have stepped, which ends a step of training.

    A GradScaler may skip an optimizer: if another one steps a second time, the training step before has ended without
    the skipped one. A step of an optimizer raises a RuntimeError if it has more or fewer parameters than when this was
    made.

    Args:
        optimizers: Result of `optimizers_from`.
        ended: Called at the end of each step of training.
        begins: Called before each step of an optimizer.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], ended: Callable[[], None], begins: Callable[[], None] = lambda: None
    ) -> None:
        self._ended = ended
        self._may_begin = begins
        self._counts = [_count(each) for each in optimizers]
        self._stepped: set[int] = set()
        # The optimizers keep this object alive through their hooks, also if the user drops the `Outer`: training would
        # go on otherwise, and nothing would be exchanged.
        self._handles = [
            handle
            for number, each in enumerate(optimizers)
            for handle in (
                each.register_step_pre_hook(lambda stepper, *_, number=number: self._begins(stepper, number)),
                each.register_step_post_hook(lambda _stepper, *_, number=number: self._has_stepped(number)),
            )
        ]

    def finish(self) -> None:
        """Ends the training step in which some optimizers have stepped, if there is one, by calling `ended`."""
        if self._stepped:
            self._stepped.clear()
            self._ended()

    def forget(self) -> None:
        """Starts a new training step; optimizers that have stepped in the present one do not count."""
        self._stepped.clear()

    def close(self) -> None:
        """Removes the hooks from the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _begins(self, optimizer: Optimizer, number: int) -> None:
        if _count(optimizer) != self._counts[number]:
            raise RuntimeError(
                f"`optimizer` {type(optimizer).__name__} trains {_count(optimizer)} parameters, and "
                f"{self._counts[number]} when Outer was made: call synchronize() and close(), and make a new Outer"
            )
        if number in self._stepped:
            self.finish()
        self._may_begin()

    def _has_stepped(self, number: int) -> None:
        self._stepped.add(number)
        if len(self._stepped) == len(self._counts):
            self.finish()


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def optimizers_from(given: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    """Returns the optimizers of a model as a tuple.

    Args:
        given: One optimizer, or a list of several that train different parameters.

    Raises:
        TypeError: `given` has another type.
        ValueError: The list is empty, or two optimizers train the same parameter.
    """
    if isinstance(given, Optimizer):
        return (given,)
    kinds = [type(each).__name__ for each in given] if isinstance(given, Sequence) else []
    if not isinstance(given, Sequence) or not all(isinstance(each, Optimizer) for each in given):
        raise TypeError(
            f"`optimizer` is a {type(given).__name__}{f' of {kinds}' if kinds else ''}; wanted a "
            "torch.optim.Optimizer, or a list of them"
        )
    if not given:
        raise ValueError("`optimizer` is empty; wanted every optimizer that trains the model")
    seen: dict[int, Optimizer] = {}
    for optimizer in given:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                other = seen.setdefault(id(parameter), optimizer)
                if other is not optimizer:
                    raise ValueError(
                        f"`optimizer`: {type(other).__name__} and {type(optimizer).__name__} train the same parameter "
                        f"of shape {tuple(parameter.shape)}; wanted each parameter in one of them"
                    )
    return tuple(given)


def untrained(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Returns the names of parameters with `requires_grad` that no optimizer trains."""
    known = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in known]
