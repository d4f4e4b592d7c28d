"""Rounds of an exchange: pieces of which no two have the same sender or the same receiver."""

from collections.abc import Mapping, Sequence

from .cuts import Cut


Colours = dict[int, dict[int, Cut]]


def matchings(cuts: Sequence[Cut]) -> list[tuple[Cut, ...]]:
    """Colours the edges of a bipartite graph with as many colours as its largest degree (Konig's theorem)."""
    at_sender: Colours = {}
    at_receiver: Colours = {}
    for cut in cuts:
        out, into = at_sender.setdefault(cut.sender, {}), at_receiver.setdefault(cut.receiver, {})
        free_out, free_into = _first_free(out), _first_free(into)
        if free_out in into:
            _swap(cut.receiver, free_out, free_into, at_sender, at_receiver)
        out[free_out] = into[free_out] = cut
    colours: dict[int, list[Cut]] = {}
    for used in at_sender.values():
        for colour, cut in used.items():
            colours.setdefault(colour, []).append(cut)
    return [tuple(colours[colour]) for colour in sorted(colours)]


def _swap(receiver: int, a: int, b: int, at_sender: Colours, at_receiver: Colours) -> None:
    """Exchanges the colours on the path of `a` and `b` edges that starts at `receiver`, so that `a` becomes free."""
    path, sides, node, colour = [], (at_receiver, at_sender), receiver, a
    while (cut := sides[len(path) % 2][node].get(colour)) is not None:
        path.append((cut, colour))
        node = cut.sender if len(path) % 2 else cut.receiver
        colour = b if colour == a else a
    for cut, colour in path:
        del at_sender[cut.sender][colour], at_receiver[cut.receiver][colour]
    for cut, colour in path:
        other = b if colour == a else a
        at_sender[cut.sender][other] = at_receiver[cut.receiver][other] = cut


def _first_free(used: Mapping[int, Cut]) -> int:
    colour = 0
    while colour in used:
        colour += 1
    return colour
