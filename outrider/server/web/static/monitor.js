// The server's metrics over time: scrapes /metrics while the page is visible.

import { Chart } from "./charts.js";
import { figuresBetween, parseMetrics } from "./metrics.js";

const EVERY = 2000; // milliseconds between scrapes

const CHARTS = {
  rate: { title: "Tokens per second", unit: "tok/s", places: 1, least: 10, lines: ["rate"] },
  alpha: { title: "Accepted drafts", unit: "α", places: 2, least: 1, lines: ["alpha"] },
  tau: { title: "Tokens per pass", unit: "τ", places: 2, least: 2, lines: ["tau"] },
  queue: { title: "Requests", unit: "", places: 0, least: 2, lines: ["running", "waiting"] },
  pages: { title: "Cache pages in use", unit: "", places: 0, least: 10, lines: ["pages"] },
};

export class Monitor {
  /** Draws into the elements with data-chart; calls `onState(error or null)` after each scrape. */
  constructor(root, api, onState) {
    this.api = api;
    this.onState = onState;
    this.charts = Object.entries(CHARTS).map(
      ([name, options]) => new Chart(root.querySelector(`[data-chart="${name}"]`), options),
    );
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Scrapes now and at intervals; a hidden page does not. */
  start() {
    clearTimeout(this.timer);
    if (!document.hidden) this.#scrape();
  }

  async #scrape() {
    const asked = performance.now();
    try {
      const sums = parseMetrics(await this.api.metrics());
      const figures = figuresBetween(this.sums, sums, (asked - this.asked) / 1000);
      for (const chart of this.charts) chart.add(asked, chart.lines.map((name) => figures[name]));
      [this.sums, this.asked] = [sums, asked];
      await this.onState(null);
    } catch (error) {
      this.sums = undefined; // a restarted server counts from 0
      await this.onState(error);
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.#scrape(), EVERY);
  }
}
