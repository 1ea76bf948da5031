// An answer as tokens: one span for each, coloured by origin, walked with the arrow keys.

const entries = new WeakMap(); // span -> its token's provenance

/** The provenance behind a span of an answer; undefined for anything else. */
export function entryOf(span) {
  return entries.get(span);
}

export class TokensView {
  constructor(label) {
    this.element = document.createElement("div");
    this.element.className = "tokens";
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", `${label}. Arrow keys walk through its tokens.`);
    this.element.addEventListener("keydown", (event) => this.#walk(event));
  }

  /** Shows more tokens. What the model wrote goes in as text, never as markup. */
  add(tokens) {
    const spans = tokens.map((entry) => {
      const span = document.createElement("span");
      span.className = `token ${entry.origin}`;
      span.textContent = entry.token;
      if (entry.round !== undefined) {
        span.tabIndex = -1;
        span.dataset.round = entry.round;
        span.setAttribute("aria-describedby", "card");
        entries.set(span, entry);
      }
      return span;
    });
    this.element.append(...spans);
  }

  /** Marks the tokens of one round, or none. */
  mark(round) {
    for (const span of this.element.querySelectorAll(".same-round")) span.classList.remove("same-round");
    if (round === null) return;
    for (const span of this.element.querySelectorAll(`[data-round="${round}"]`)) span.classList.add("same-round");
  }

  #walk(event) {
    const spans = [...this.element.querySelectorAll("[data-round]")];
    const at = spans.indexOf(document.activeElement);
    const next = step(event.key, at, spans);
    if (event.key === "Escape" && at >= 0) this.element.focus();
    if (next === undefined) return;
    event.preventDefault();
    next.focus();
  }
}

/** The span that a key leads to from place `at` (-1: none yet); undefined where the key leads nowhere. */
function step(key, at, spans) {
  const round = spans[at]?.dataset.round;
  switch (key) {
    case "ArrowRight":
      return spans[at + 1];
    case "ArrowLeft":
      return spans[at - 1];
    case "ArrowDown":
      return at < 0 ? spans[0] : spans.find((span, i) => i > at && span.dataset.round !== round);
    case "ArrowUp":
      return spans.findLast((span, i) => i < at && span.dataset.round !== round);
    case "Home":
      return spans[0];
    case "End":
      return spans.at(-1);
    default:
      return undefined;
  }
}
