// The strip of rounds: a column for each target pass, drafted against accepted tokens.

import { ORIGINS } from "./run.js";
import { svg } from "./svg.js";

const COLUMN = [4, 14]; // min and max pixels from one round to the next
const HEIGHT = 88; // of the drafts
const FOOT = 8; // of the target's own token, below them
const TALLEST = 11; // pixels of one drafted token, at most

export class Strip {
  /** `onRound(number or null)` is called with the round in focus. */
  constructor(element, caption, onRound) {
    this.element = element;
    this.caption = caption;
    this.onRound = onRound;
    this.drawing = svg("svg", { height: HEIGHT + FOOT + 4, "aria-hidden": "true" });
    element.append(this.drawing);
    element.addEventListener("pointermove", (event) => this.#look(Math.floor(this.#x(event) / this.step)));
    element.addEventListener("pointerleave", () => this.#look(-1));
    element.addEventListener("focus", () => caption.setAttribute("aria-live", "polite")); // silent while it only grows
    element.addEventListener("blur", () => {
      caption.setAttribute("aria-live", "off");
      this.#look(-1);
    });
    element.addEventListener("keydown", (event) => this.#walk(event));
    this.show([]);
    new ResizeObserver(() => this.show(this.rounds)).observe(element); // it has no width while it is hidden
  }

  /** Draws these rounds; call again as they grow. */
  show(rounds) {
    const [step, scale] = this.#sizes(rounds);
    const same = rounds === this.rounds && step === this.step && scale === this.scale;
    if (!same) this.drawing.replaceChildren();
    if (rounds !== this.rounds) this.at = -1;
    Object.assign(this, { rounds, step, scale });
    const from = Math.max(0, this.drawing.childElementCount - 1); // the last one drawn may have grown
    this.drawing.children[from]?.remove();
    for (let i = from; i < rounds.length; i += 1) this.drawing.append(column(rounds[i], i, step, scale));
    this.drawing.setAttribute("width", Math.max(1, rounds.length * step));
    this.drawing.children[this.at]?.classList.add("marked");
    if (this.at < 0) this.element.scrollLeft = this.element.scrollWidth; // the round in focus stays in view
    this.#describe();
  }

  /** Marks one round by its number, or none. */
  mark(number) {
    this.at = number === null ? -1 : this.rounds.findIndex((round) => round.number === number);
    for (const marked of this.drawing.querySelectorAll(".marked")) marked.classList.remove("marked");
    this.drawing.children[this.at]?.classList.add("marked");
    this.#describe();
  }

  /** Pixels from round to round, and of one drafted token: as large as lets all be seen. */
  #sizes(rounds) {
    const [least, most] = COLUMN;
    const step = Math.max(least, Math.min(most, this.element.clientWidth / Math.max(1, rounds.length)));
    const tallest = rounds.reduce((drafted, round) => Math.max(drafted, round.drafted), 1);
    return [step, Math.min(TALLEST, HEIGHT / tallest)];
  }

  #x(event) {
    return event.clientX - this.drawing.getBoundingClientRect().left;
  }

  #look(index) {
    const round = this.rounds[index];
    if ((round?.number ?? null) === (this.rounds[this.at]?.number ?? null)) return;
    this.mark(round?.number ?? null);
    this.onRound(round?.number ?? null);
  }

  #walk(event) {
    const last = this.rounds.length - 1;
    const to = { ArrowLeft: this.at < 0 ? last : this.at - 1, ArrowRight: this.at + 1, Home: 0, End: last }[event.key];
    if (to === undefined || !this.rounds[to]) return;
    event.preventDefault();
    this.#look(to);
    this.element.scrollLeft = to * this.step - this.element.clientWidth / 2;
  }

  #describe() {
    const round = this.rounds[this.at];
    const sum = (key) => this.rounds.reduce((total, each) => total + each[key], 0);
    const all = `${this.rounds.length} rounds: ${sum("drafted")} drafted, ${sum("accepted")} accepted`;
    this.element.setAttribute("aria-label", `Rounds of the answer. ${all}. Arrow keys select a round.`);
    this.caption.textContent = round ? sentence(round) : this.rounds.length ? all : "No round yet";
  }
}

function sentence(round) {
  const own = round.last === "accepted" ? "" : `, then ${ORIGINS[round.last].name}`;
  const who = round.drafter ? ` by ${round.drafter}` : "";
  return `Round ${round.number + 1}: ${round.drafted} drafted${who}, ${round.accepted} accepted${own}`;
}

/** One round: accepted tokens filled from the line up, rejected ones hollow above, the target's own below. */
function column(round, index, step, scale) {
  const group = svg("g", { transform: `translate(${index * step} 0)` });
  group.append(svg("rect", { class: "hit", width: step, height: HEIGHT + FOOT + 4 }));
  const width = step - (step > 6 ? 2 : 1);
  const gap = scale > 4 ? 1.5 : 0;
  for (let i = 0; i < round.drafted; i += 1) {
    const kept = i < round.accepted;
    const inset = kept ? 0 : 0.5; // half of the outline
    group.append(
      svg("rect", {
        class: kept ? "kept" : "refused",
        x: inset,
        y: HEIGHT - (i + 1) * scale + gap + inset,
        width: width - 2 * inset,
        height: Math.max(0.5, scale - gap - 2 * inset),
      }),
    );
  }
  if (round.last !== "accepted") {
    const own = { class: `own ${round.last}`, y: HEIGHT + 4, width, height: FOOT - 2 };
    group.append(svg("rect", own));
  }
  return group;
}
