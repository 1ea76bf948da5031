// The server's figures over time: scrapes /metrics while the page is looked at.

import { Chart } from "./charts.js";
import { figuresBetween, parseMetrics } from "./metrics.js";

const EVERY = 2000; // milliseconds between scrapes

const CHARTS = {
  rate: { title: "Tokens a second", unit: "tok/s", places: 1, least: 10, lines: ["rate"] },
  alpha: { title: "Accepted drafts", unit: "α", places: 2, least: 1, lines: ["alpha"] },
  tau: { title: "Tokens a pass", unit: "τ", places: 2, least: 2, lines: ["tau"] },
  queue: { title: "Requests", unit: "", places: 0, least: 2, lines: ["running", "waiting"] },
  pages: { title: "Cache pages in use", unit: "", places: 0, least: 10, lines: ["pages"] },
};

export class Monitor {
  /** Draws into the elements with data-chart; tells `onState(error or null)` how the last scrape went. */
  constructor(root, api, onState) {
    this.api = api;
    this.onState = onState;
    this.charts = Object.entries(CHARTS).map(
      ([name, options]) => new Chart(root.querySelector(`[data-chart="${name}"]`), options),
    );
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Scrapes now and from then on; a page nobody sees asks nothing. */
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
      this.sums = undefined; // a server that comes back counts from nought
      await this.onState(error);
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.#scrape(), EVERY);
  }
}
