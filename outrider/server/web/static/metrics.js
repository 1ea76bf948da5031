// The server's /metrics: Prometheus text to samples, and samples to values over time. No DOM.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;

/** The sum over all labels of each metric of a Prometheus text, by name. */
export function parseMetrics(text) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const [, name, , value] = match;
    sums.set(name, (sums.get(name) ?? 0) + Number(value));
  }
  return sums;
}

/** Rates between two scrapes `seconds` apart, and the current gauges. null: no value. */
export function figuresBetween(before, after, seconds) {
  const grown = (name) => (before && after.has(name) ? after.get(name) - (before.get(name) ?? 0) : null);
  const tokens = grown("outrider_generation_tokens_total");
  const accepted = grown("outrider_spec_accepted_tokens_total") ?? 0; // no such line before the first draft
  const rejected = grown("outrider_spec_refusals_total") ?? 0;
  return {
    rate: tokens === null ? null : tokens / seconds,
    alpha: ratio(accepted, accepted + rejected),
    tau: ratio(tokens, tokens - accepted), // every pass adds one token of the target's own
    running: after.get("outrider_requests_running") ?? null,
    waiting: after.get("outrider_requests_waiting") ?? null,
    pages: after.get("outrider_pages_used") ?? null,
  };
}

function ratio(part, whole) {
  return whole > 0 ? part / whole : null;
}
