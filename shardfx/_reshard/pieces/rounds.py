"""The rounds in which devices send parts: in one round, each device sends at most one
part and receives at most one part.

The parts are the edges of a bipartite graph from senders to receivers. The rounds are
colours of the edges, and no two edges of a device's node have one colour. By Konig's
theorem, as many colours are needed as the largest number of parts that a device sends
or receives. For device 0 sending to 1 and 2, and device 1 sending to 2, these are two
rounds: 0 to 1 and 1 to 2 in the first, 0 to 2 in the second.
"""

from typing import NamedTuple

import numpy as np

from .integers import numbered, occurrences, stable_order


# Complete components are known after three steps. Larger ones would need many.
_COMPONENT_STEPS = 4


def matchings(senders: np.ndarray, receivers: np.ndarray) -> list[np.ndarray]:
    """Groups parts into as few rounds as there can be. Returns the positions of the
    parts of each round, ordered by their senders.

    `senders` and `receivers` have the numbers of the devices of each part.
    """
    if not len(senders):
        return []
    colours = _colours(senders, receivers)
    by_sender = stable_order(senders)
    order = by_sender[stable_order(colours[by_sender])]
    sizes = np.bincount(colours)
    return np.split(order, np.cumsum(sizes)[:-1])


def _colours(senders: np.ndarray, receivers: np.ndarray) -> np.ndarray:
    """The round of each part: by distances around rings if all pairs of devices have as
    many parts and this gives the fewest rounds, else by swaps along paths. `senders`
    and `receivers` have the devices of each part.
    """
    most_sent = np.bincount(senders).max()
    most_received = np.bincount(receivers).max()
    fewest_rounds = max(most_sent, most_received)
    if fewest_rounds == 1:
        return np.zeros(len(senders), np.int64)

    # A pair of devices as one integer.
    span = int(receivers.max()) + 1
    pairs, pair_of_part = numbered(senders * span + receivers)
    parts_of_pair = np.bincount(pair_of_part)
    parts_of_each = parts_of_pair[0]
    if (parts_of_pair == parts_of_each).all():
        colours_of_pairs = _by_distance(pairs // span, pairs % span)
        if colours_of_pairs is not None:
            first_colours = colours_of_pairs * parts_of_each
            colours = first_colours[pair_of_part] + occurrences(pair_of_part)
            if colours.max() < fewest_rounds:
                return colours
    return _by_paths(senders.tolist(), receivers.tolist())


def _by_distance(senders: np.ndarray, receivers: np.ndarray) -> np.ndarray | None:
    """The round of each pair of devices, given as `senders` and `receivers`: the
    distance from the sender to the receiver around a ring. `None` if the devices are
    not soon known to fall into components.

    The devices of one component are on one ring. Two pairs with one sender or one
    receiver have different distances. In a complete component, as in an all-gather or
    an all-to-all, there are no more distances than a device has pairs. In other
    components there can be more.
    """
    components = _components(senders, receivers)
    if components is None:
        return None
    # The position of each device on its component's ring, and the devices on it.
    sender = _ranks(components, senders)
    receiver = _ranks(components, receivers)
    ring_sizes = np.maximum(sender.counts, receiver.counts)
    distances = (receiver.ranks - sender.ranks) % ring_sizes
    return _ranks(components, distances).ranks


def _components(senders: np.ndarray, receivers: np.ndarray) -> np.ndarray | None:
    """A number for each pair of a sender and a receiver, equal for the pairs of one
    component of the graph. `None` if it is not found in a few steps.
    """
    # Each pair begins with the number of its receiver.
    numbers = receivers
    for _ in range(_COMPONENT_STEPS):
        before = numbers
        for devices in (senders, receivers):
            device_count = int(devices.max()) + 1
            # Pairs that share a device take the least of their numbers.
            least_numbers = np.full(device_count, np.iinfo(np.int64).max)
            np.minimum.at(least_numbers, devices, numbers)
            numbers = least_numbers[devices]
        if (numbers == before).all():
            return numbers
    return None


class _Ranks(NamedTuple):
    """For each element, its rank among the different values in its group, and how many
    different values the group has.
    """

    ranks: np.ndarray
    counts: np.ndarray


def _ranks(groups: np.ndarray, values: np.ndarray) -> _Ranks:
    """The ranks of `values`, whole numbers from 0, each in the group that `groups`
    says: 0, 1, 0 for the values 5, 9, 7 in the groups 0, 0, 1.
    """
    span = int(values.max()) + 1
    keys, number_of_key = numbered(groups * span + values)
    values_of_group = np.bincount(keys // span)
    first_key_of_group = np.cumsum(values_of_group) - values_of_group
    return _Ranks(
        ranks=number_of_key - first_key_of_group[groups],
        counts=values_of_group[groups],
    )


class _Node:
    """A sender or a receiver: its part of each colour, and the colours as bits."""

    def __init__(self) -> None:
        self.parts: dict[int, int] = {}
        self.colours = 0

    def first_free(self) -> int:
        """The first colour that no part of the device has."""
        free = ~self.colours & (self.colours + 1)
        return free.bit_length() - 1

    def add(self, colour: int, part: int) -> None:
        """Gives a part of the device a colour that no other part of it has."""
        self.parts[colour] = part
        self.colours |= 1 << colour

    def remove(self, colour: int) -> None:
        """Takes a colour from the part that has it."""
        del self.parts[colour]
        self.colours ^= 1 << colour


def _by_paths(senders: list[int], receivers: list[int]) -> np.ndarray:
    """The round (colour) of each part of any graph. A part gets the first colour that is
    free at its sender. If it is not free at the receiver, the parts on a path of two
    colours swap these. `senders` and `receivers` have the devices of each part.
    """
    sender_nodes = {device: _Node() for device in dict.fromkeys(senders)}
    receiver_nodes = {device: _Node() for device in dict.fromkeys(receivers)}
    sender_of = [sender_nodes[device] for device in senders]
    receiver_of = [receiver_nodes[device] for device in receivers]
    for part, (sender, receiver) in enumerate(zip(sender_of, receiver_of, strict=True)):
        colour = sender.first_free()
        if colour in receiver.parts:
            free = receiver.first_free()
            _swap_colours(
                receiver=receiver,
                a=colour,
                b=free,
                sender_of=sender_of,
                receiver_of=receiver_of,
            )
        sender.add(colour, part)
        receiver.add(colour, part)

    colours = np.empty(len(senders), np.int64)
    for node in sender_nodes.values():
        for colour, part in node.parts.items():
            colours[part] = colour
    return colours


def _swap_colours(
    receiver: _Node,
    a: int,
    b: int,
    sender_of: list[_Node],
    receiver_of: list[_Node],
) -> None:
    """Changes colours of parts, in place, so that no part that `receiver` receives has
    the colour `a`. None has the colour `b` before. For this, the parts on a path swap
    the two colours. The path starts at `receiver` with the part of colour `a`. Each
    next part shares a device with the one before, and has the other colour. `sender_of`
    and `receiver_of` have the sender and the receiver of each part.
    """
    path: list[tuple[int, int]] = []
    node = receiver
    colour = a
    while (part := node.parts.get(colour)) is not None:
        path.append((part, colour))
        # The path alternates between receivers and senders.
        is_at_sender = len(path) % 2 == 1
        node = sender_of[part] if is_at_sender else receiver_of[part]
        colour = b if colour == a else a
    for part, colour in path:
        sender_of[part].remove(colour)
        receiver_of[part].remove(colour)
    for part, colour in path:
        other = b if colour == a else a
        sender_of[part].add(other, part)
        receiver_of[part].add(other, part)
