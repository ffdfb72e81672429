"""How the exchange of gradients and what a step computes go together, in the simplest model that has both.

A step is a forward pass, then a backward pass beside which the gradients travel:

    step = forward + max(backward, exchange)        forward = backward / 2

It leaves out that the first bucket comes a little after backward begins and the last one with its end; the prices of
plans (advise.py) have both. Needs no torch.
"""

FORWARD_SHARE = 0.5
"""Time of a forward pass over that of a backward pass. Source: Kaplan et al., "Scaling Laws for Neural Language
Models", arXiv:2001.08361, section 2.1: backward takes twice the operations of forward."""

_FORWARD = FORWARD_SHARE / (1 + FORWARD_SHARE)


def step_seconds(compute_seconds: float, exchange_seconds: float) -> float:
    """How long a step takes.

    Args:
        compute_seconds: Of its forward and backward pass.
        exchange_seconds: Of all its gradients.
    """
    forward = _FORWARD * compute_seconds
    return forward + max(compute_seconds - forward, exchange_seconds)


def compute_seconds(step: float, exchange: float) -> float:
    """What a step computes, from how long it takes: the other way round.

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
    """The step of one node from which on several nodes train more than one of them does.

    They train n t / (t / 3 + max(2 t / 3, e)) times as much, which is 1 where t (n - 1 / 3) is e.

    Args:
        nodes: How many there are, 2 or more.
        exchange_seconds: Of all gradients between them.
    """
    return exchange_seconds / (nodes - _FORWARD)
