"""A trial before the first step: do several network cards carry more than the one that gloo uses?

Gloo's loops are C++ and the thread that deals a message over cards is Python: on two cards of 100 Mbit/s that is of no
account, on two of 100 Gbit/s it may be slower than gloo on one of them. So the same swap is timed over gloo's
connections and over all cards, and each card is timed alone, which the first messages are dealt by. All ranks take the
same answer; it changes no bit.
"""

import logging
import time
from collections.abc import Sequence

import torch

from gradwire.comms.bootstrap.cards import Cards
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import ALL_NICS
from gradwire.comms.links.quick_probe import DRAIN_NBYTES, TRIAL_NBYTES, Meeting, swapped_nbytes
from gradwire.comms.links.unit_rates import pairings
from gradwire.comms.transport.torch_group import GlooTransport

SWAPS = 2
"""The swaps of each kind, of which the shortest counts."""

log = logging.getLogger("gradwire")


def try_cards(communicator: Communicator) -> None:
    """Sees what the cards carry, and leaves all to gloo where its one is as fast.

    Every rank calls it before its first bucket. Does nothing on one node, and where nodes have one card.

    Args:
        communicator: Of the ranks; `cards.are_used` says afterwards whether large messages go over all cards.
    """
    cards, nodes = communicator.cards, len(communicator.cluster.nodes)
    if cards is None or nodes == 1:
        return
    meeting = Meeting(communicator)
    if not meeting.is_possible:
        log.warning("network cards are not tried: the ranks between nodes are not connected by gloo")
        cards.are_used = False
        return
    pairs = pairings(nodes, 1)[0]
    nbytes = swapped_nbytes(max(seconds for _, _, seconds, _ in meeting.meet(pairs, TRIAL_NBYTES)))
    alone = _shortest(meeting, pairs, nbytes)
    cards.are_used = cards.were_tried = True
    meeting.carry_out_by_nodes("connecting the network cards", lambda rail: rail.open_cards())
    other = meeting.partner(pairs)
    meeting.carry_out_by_nodes("trying each network card", lambda rail: _each_alone(rail, cards, other, nbytes))
    together = _shortest(meeting, pairs, nbytes)
    if communicator.config.nics == ALL_NICS and together >= alone:  # all ranks were told the same times
        cards.are_used = False
        meeting.carry_out_by_nodes("leaving the network cards", lambda rail: rail.leave_cards())
    log.info(
        "network cards: %.1f MB took %.3f s over %s, and %.3f s over gloo's one: %s",
        nbytes / 1e6,
        together,
        ", ".join(cards.names),
        alone,
        "large messages go over all of them" if cards.are_used else "gloo's carries all",
    )


def _shortest(meeting: Meeting, pairs: Sequence[tuple[int, int]], nbytes: int) -> float:
    """Seconds of a swap on the slowest pair, the best of some: a busy processor makes any of them longer."""
    return min(max(seconds for _, _, seconds, _ in meeting.meet(pairs, nbytes)) for _ in range(SWAPS))


def _each_alone(rail: GlooTransport, cards: Cards, other: int | None, nbytes: int) -> None:
    """Has each card carry a swap with another rank alone, and notes what it gives; None pauses."""
    streams = rail.open_cards()
    if streams is None or other is None:
        return
    sent = torch.zeros(max(DRAIN_NBYTES, nbytes), dtype=torch.uint8, device="cpu")
    received = torch.empty_like(sent)
    for card in streams.cards_in_use:
        streams.exchange_over(card, [(other, sent[:DRAIN_NBYTES], received[:DRAIN_NBYTES])]).wait()
        began = time.perf_counter()
        streams.exchange_over(card, [(other, sent[:nbytes], received[:nbytes])]).wait()
        cards.seen(card, nbytes / (time.perf_counter() - began))
