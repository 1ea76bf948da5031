// The card with the provenance of the token under the pointer or the keyboard's focus.

import { entryOf } from "./answer.js";
import { digits, ORIGINS } from "./run.js";

const MARGIN = 8; // pixels between the card and the edge of the window

export class TokenCard {
  /** Watches the tokens of `log`; calls `onRound(span or null)` with the one in focus. */
  constructor(element, log, onRound) {
    this.element = element;
    this.onRound = onRound;
    this.field = Object.fromEntries([...element.querySelectorAll("[data-field]")].map((e) => [e.dataset.field, e]));
    for (const name of ["pointerover", "focusin"]) log.addEventListener(name, (event) => this.#look(event.target));
    log.addEventListener("pointerleave", () => this.hide());
    log.addEventListener("focusout", () => this.hide());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    window.addEventListener("resize", () => this.hide());
    document.addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  hide() {
    this.element.hidden = true;
    this.onRound(null);
  }

  #look(target) {
    const span = target.closest(".token");
    const entry = span && entryOf(span);
    if (!entry) return this.hide();
    this.#fill(entry);
    this.element.hidden = false;
    this.#place(span.getClientRects()[0]);
    return this.onRound(span);
  }

  #fill(entry) {
    const origin = ORIGINS[entry.origin];
    this.element.dataset.origin = entry.origin;
    this.field.token.textContent = entry.token ? JSON.stringify(entry.token) : "no text of its own";
    this.field.id.textContent = entry.token_id;
    this.field.origin.textContent = `${origin.name}: ${origin.says}`;
    this.field.drafter.textContent = entry.drafter || "none";
    this.field.round.textContent = entry.round;
    this.field.position.textContent = entry.position;
    for (const name of ["target", "draft"]) {
      const value = entry[`${name}_prob`] ?? null; // null: not known, and not shown
      const row = this.field[name].parentElement;
      row.hidden = value === null;
      this.field[name].textContent = value === null ? "" : digits(value, 4);
      row.style.setProperty("--share", value ?? 0);
    }
  }

  /** Below the token, or above where there is no room; never outside the window. */
  #place(token) {
    if (!token) return;
    const card = this.element.getBoundingClientRect();
    const left = Math.min(token.left, window.innerWidth - card.width - MARGIN);
    const below = token.bottom + MARGIN;
    const top = below + card.height < window.innerHeight ? below : token.top - card.height - MARGIN;
    this.element.style.setProperty("left", `${Math.max(MARGIN, left)}px`);
    this.element.style.setProperty("top", `${Math.max(MARGIN, top)}px`);
  }
}
