"""One step of training with several optimizers, such as Muon for matrices and AdamW for the rest: when has it ended?"""

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer


class OptimizerSteps:
    """Says when each of a model's optimizers has stepped: a step of training has ended then, and not before.

    An optimizer that a GradScaler skips does not hold up the others: where one of them steps once more, the step before
    has ended without it.

    Args:
        optimizers: Of `optimizers_from`.
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
        # The optimizers keep these objects: without them steps would go on, and nothing would be exchanged.
        self._handles = [
            handle
            for number, each in enumerate(optimizers)
            for handle in (
                each.register_step_pre_hook(lambda stepper, *_, number=number: self._begins(stepper, number)),
                each.register_step_post_hook(lambda _stepper, *_, number=number: self._has_stepped(number)),
            )
        ]

    def finish(self) -> None:
        """Ends the step of training in which some optimizers have stepped, if there is one."""
        if self._stepped:
            self._stepped.clear()
            self._ended()

    def forget(self) -> None:
        """Begins a step of training anew: what optimizers have done of one belongs to none any more."""
        self._stepped.clear()

    def close(self) -> None:
        """Ends nothing any more."""
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
    """Returns the optimizers of a model.

    Args:
        given: One, or several that train different parameters.

    Raises:
        TypeError: It is something else.
        ValueError: There is none, or two train the same parameter.
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


def left_alone(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Returns the names of the parameters that want a gradient and that none of the optimizers trains."""
    known = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in known]
