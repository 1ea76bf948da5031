"""Pages that answer a question: one self-contained HTML file, with tables, and plots drawn without a library.

A page makes no outside request, runs no script, and reads well in light and dark. All text that is given is escaped;
what is `Html` already is taken as it is, so text from a model or a file can only get in escaped.

    from outrider.report.page import Section, code, note, page, paragraph, table
    from outrider.report.plot import Bars, Line, Mark, bar_plot, line_plot, stacked_bars
    from outrider.report.numbers import count, memory, seconds, share, times

    page("Title", [Section("Speed", [paragraph("..."), table(["drafter", "speed-up"], [["suffix", times(1.52)]])])])

- `page(title, sections) -> str`: the file. A `Section` has a title ("" for none) and parts, which are `Html`.
- `table(head, rows)`, `paragraph`, `note`, `code`, `verdict`, `details`: parts. Cells are text, or `Html`.
- `line_plot(title, lines, across=...)`: series over a common axis; a `Line` may have a range for each point (a
  confidence interval), a `Mark` is a named line across the plot (the break-even), `log=True` for powers of two.
- `bar_plot(title, names, bars)`: a group of bars for each name. `stacked_bars(title, names, bars)`: a row for each
  name, its parts one after another (time in a round, memory on a device).
- plots are `Html` too; each is a sound SVG file by itself.
- `memory(bytes)`, `seconds`, `share`, `times`, `count`: a number with its unit, in three digits.
"""
