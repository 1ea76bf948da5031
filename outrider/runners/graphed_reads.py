"""Captured passes in which a head reads what its target keeps: one copy to the device and one replay each.

For heads whose rows depend only on the target's outputs at their own positions, so that it does not matter how a text's
rows are divided between passes. Padding rows read and write in the scratch page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.pinned_inputs import PinnedInputs
from outrider.core.sequence import Span
from outrider.runners.cuda_graphs import capture
from outrider.runners.layout import text_rows
from outrider.runners.paged_model import PagedModel, tapped_pages

ROWS = (32, 64, 128, 256, 512, 1024, 2048)
"""Rows of the passes. Two of the largest take all that is read at once (MAX_READ_ROWS): a third would have to wait
until the inputs of the first have arrived."""
MAX_BYTES = 64 << 20
"""Max bytes of the tapped outputs that a pass gathers: where outputs are wide, passes have fewer rows."""

ReadRows = Callable[[Tensor, Tensor], None]
"""Reads rows, given their slots and positions, int64 [N] both."""


class GraphedRead:
    """The inputs of one size of pass, and the launches that read them."""

    def __init__(self, rows: int, read: ReadRows, model: PagedModel, graph_pool: Any) -> None:
        self._inputs, self._read = PinnedInputs(2 * rows, model.device), read
        self._slots, self._positions = self._inputs.ints.view(2, rows)
        self._padding = np.array([[model.scratch_slot], [0]])
        self._send(np.empty((2, 0), dtype=np.int64))  # capturing runs the work first
        self._graph = capture(self.launch, graph_pool, f"a head's reads of {rows} rows")

    def run(self, rows: NDArray[np.int64]) -> None:
        """Read rows [2, N]: their slots and positions."""
        self._send(rows)
        self._graph.replay()

    def launch(self) -> None:
        """The launches that are captured."""
        self._read(self._slots, self._positions)

    def _send(self, rows: NDArray[np.int64]) -> None:
        array, count = self._inputs.array().reshape(2, -1), rows.shape[1]
        array[:, :count] = rows
        array[:, count:] = self._padding
        self._inputs.send()


class GraphedReads:
    """A head's captured reads, by rows; none until `capture`."""

    def __init__(self, read: ReadRows, model: PagedModel, graph_pool: Any) -> None:
        self._read, self._model, self._graph_pool = read, model, graph_pool
        features = tapped_pages(model).features
        self.sizes = [rows for rows in ROWS if rows == ROWS[0] or rows * features[0].nbytes <= MAX_BYTES]
        self._captured: dict[int, GraphedRead] = {}

    @property
    def captured(self) -> bool:
        return len(self._captured) == len(self.sizes)

    def capture(self) -> Iterator[int]:
        """Capture every size, the largest first: the others share its memory. Yields each."""
        for rows in reversed(self.sizes):
            if rows not in self._captured:
                self._captured[rows] = GraphedRead(rows, self._read, self._model, self._graph_pool)
            yield rows

    def run(self, spans: Seq[Span]) -> None:
        """Read the text of these spans, in several passes where it has more rows than the largest."""
        rows, most = text_rows(spans, self._model.pool), self.sizes[-1]
        for begin in range(0, rows.shape[1], most):
            part = rows[:, begin : begin + most]
            size = next(each for each in self.sizes if each >= part.shape[1])
            self._captured[size].run(part)
