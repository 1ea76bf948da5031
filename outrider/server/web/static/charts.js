// Small line charts of the last two minutes.

import { digits } from "./run.js";
import { svg } from "./svg.js";

const WIDTH = 300;
const HEIGHT = 48;
const WINDOW = 120_000; // milliseconds shown

/** A chart of one or more lines. `least` is the smallest value of the top of its axis. */
export class Chart {
  constructor(element, { title, unit, places, least, lines }) {
    Object.assign(this, { element, title, unit, places, least, lines });
    this.points = []; // [time, one value for each line]
    this.now = element.querySelector(".now");
    this.top = element.querySelector(".top");
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.paths = lines.map((_, i) => svg("path", { class: `line line-${i}` }));
    this.drawing.append(svg("path", { class: "base", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` }), ...this.paths);
    element.querySelector(".plot").append(this.drawing);
    this.#draw(0);
  }

  /** Adds the values of this moment, null where there are none, and drops points that are too old. */
  add(time, values) {
    this.points.push([time, values]);
    this.points = this.points.filter(([then]) => time - then <= WINDOW);
    this.#draw(time);
  }

  #draw(time) {
    const values = this.points.flatMap(([, each]) => each).filter((value) => value !== null);
    const top = nice(Math.max(this.least, ...values));
    this.top.textContent = digits(top, Number.isInteger(top) ? 0 : 1);
    this.paths.forEach((path, i) => path.setAttribute("d", this.#line(i, time, top)));
    const latest = this.points.at(-1)?.[1] ?? this.lines.map(() => null);
    const said = latest.map((value) => digits(value, this.places));
    this.now.textContent = said.join(" / ");
    const parts = this.lines.map((name, i) => `${name} ${said[i] === "–" ? "unknown" : said[i]}`);
    this.drawing.setAttribute("aria-label", `${this.title} over the last two minutes; now ${parts.join(", ")}`);
  }

  #line(index, time, top) {
    let drawing = false;
    let path = "";
    for (const [then, values] of this.points) {
      const value = values[index];
      if (value !== null) {
        const x = WIDTH * (1 - (time - then) / WINDOW);
        const y = 2 + (HEIGHT - 4) * (1 - value / top);
        path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${drawing ? "" : "h0"}`;
      }
      drawing = value !== null; // a gap where there is no value
    }
    return path;
  }
}

/** The next round number: 1, 2 or 5 times a power of ten. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value - 1e-9);
}
