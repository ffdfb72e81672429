"""The simplest model of a step with overlap.

A step is a forward pass, then a backward pass during which gradients are exchanged:

    step = forward + max(backward, exchange)        forward = backward / 2

It ignores that the first bucket is ready some time after the backward pass begins, and the last one at its end; the
predictions of `advise.py` include both. Needs no torch.
"""

FORWARD_SHARE = 0.5
"""Time of a forward pass over that of a backward pass. Source: Kaplan et al., "Scaling Laws for Neural Language
Models", arXiv:2001.08361, section 2.1: backward takes twice the operations of forward."""

_FORWARD = FORWARD_SHARE / (1 + FORWARD_SHARE)


def compute_seconds(step: float, exchange: float) -> float:
    """Returns the seconds of forward and backward pass, given those of the whole step.

    Args:
        step: Seconds of a step whose gradients are exchanged.
        exchange: Seconds of the exchange alone.

    Raises:
        ValueError: The step is no longer than its exchange.
    """
    if exchange >= step:
        raise ValueError(f"a step of {step:g} s has no room for an exchange of {exchange:g} s")
    return min(step, (step - exchange) / _FORWARD)


def least_compute_seconds(nodes: int, exchange_seconds: float) -> float:
    """Returns the least seconds of a step on one node with which several nodes train faster than one.

    n nodes train n t / (t / 3 + max(2 t / 3, e)) times as fast, which is 1 if t (n - 1 / 3) = e.

    Args:
        nodes: Number of nodes, at least 2.
        exchange_seconds: Seconds of the exchange of all gradients between them.
    """
    return exchange_seconds / (nodes - _FORWARD)
