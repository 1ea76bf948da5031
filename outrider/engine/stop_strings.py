"""Where a stop string ends a text."""

from __future__ import annotations

from functools import lru_cache

from outrider.core.errors import RequestError


class StopStrings:
    """Stop strings as one automaton (Aho and Corasick, 1975), so that their number costs nothing.

    A state is the longest end of the text that begins a stop string; 0 is none.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.longest = [0]  # characters of the longest stop string that ends here; 0: none does
        self.hold = [0]  # characters at the text's end that could still begin a stop string
        self._fall = [0]  # the state of the next shorter end
        for stop in stops:
            self._add(stop)
        queue = list(self.edges[0].values())
        for state in queue:  # by depth: every shorter end is ready before it is needed
            fall = self._fall[state]
            self.longest[state] = self.longest[state] or self.longest[fall]
            if not self.edges[state]:
                self.hold[state] = self.hold[fall]
            for char, child in self.edges[state].items():
                self._fall[child] = self.step(fall, char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self.edges[state]:
            state = self._fall[state]
        return self.edges[state].get(char, 0)

    def _add(self, stop: str) -> None:
        if not stop:
            raise RequestError("a stop string is empty and would end every text at once; leave it out")
        state = 0
        for depth, char in enumerate(stop, 1):
            child = self.edges[state].setdefault(char, len(self.edges))
            if child == len(self.edges):
                self.edges.append({})
                self.longest.append(0)
                self.hold.append(depth)
                self._fall.append(0)
            state = child
        self.longest[state] = len(stop)


@lru_cache(maxsize=64)
def automaton(stops: tuple[str, ...]) -> StopStrings | None:
    """Built once for all texts with these stop strings; None where there are none."""
    return StopStrings(stops) if stops else None
