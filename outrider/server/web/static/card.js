// The card with the provenance of the token under the pointer or the keyboard's focus.

import { digits, ORIGINS } from "./run.js";
import { entryOf } from "./tokens_view.js";

const MARGIN = 8; // pixels between the card and the edge of the window

export class TokenCard {
  /** Watches the tokens of `log`, stays above `floor`; calls `onRound(span or null)` with the one in focus. */
  constructor(element, log, floor, onRound) {
    Object.assign(this, { element, log, floor, onRound });
    this.field = Object.fromEntries([...element.querySelectorAll("[data-field]")].map((e) => [e.dataset.field, e]));
    for (const name of ["pointerover", "focusin"]) log.addEventListener(name, (event) => this.#look(event.target));
    log.addEventListener("pointerleave", () => this.hide());
    log.addEventListener("focusout", () => this.hide());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    window.addEventListener("resize", () => this.hide());
    log.addEventListener("scroll", () => !element.hidden && this.#place(), { passive: true });
  }

  hide() {
    this.element.hidden = true;
    this.onRound(null);
  }

  #look(target) {
    const span = target.closest(".token");
    const entry = span && entryOf(span);
    if (!entry) return this.hide();
    this.span = span;
    this.#fill(entry);
    this.element.hidden = false;
    this.#place();
    return this.onRound(span);
  }

  #fill(entry) {
    const origin = ORIGINS[entry.origin];
    this.element.dataset.origin = entry.origin;
    this.field.token.textContent = entry.token ? JSON.stringify(entry.token) : "no text of its own";
    this.field.id.textContent = entry.token_id;
    this.field.origin.textContent = `${origin.name}: ${origin.says}`;
    this.#row("round", entry.round + 1);
    const drafted = entry.origin !== "plain"; // a plain token has no draft
    this.#row("drafter", drafted ? entry.drafter || "none" : null);
    this.#row("position", drafted ? entry.position + 1 : null);
    for (const name of ["target", "draft"]) {
      const value = entry[`${name}_prob`] ?? null; // null: not known
      this.#row(name, value === null ? null : digits(value, 4));
      this.field[name].parentElement.style.setProperty("--share", value ?? 0);
    }
  }

  /** A row of the card; null: not shown. */
  #row(name, value) {
    this.field[name].textContent = value ?? "";
    this.field[name].parentElement.hidden = value === null;
  }

  /** Below the token, or above where there is no room; never outside the conversation, nor over the prompt. */
  #place() {
    const token = this.span.getClientRects()[0];
    const [room, card] = [this.log.getBoundingClientRect(), this.element.getBoundingClientRect()];
    if (!token || token.bottom < room.top || token.top > room.bottom) {
      this.hide(); // scrolled out of view
      return;
    }
    const left = Math.min(token.left, room.right - card.width - MARGIN);
    const below = token.bottom + MARGIN;
    const floor = this.floor.getBoundingClientRect().top - MARGIN;
    const above = Math.min(token.top - MARGIN, floor) - card.height;
    const top = below + card.height <= floor ? below : above;
    this.element.style.setProperty("left", `${Math.max(MARGIN, left)}px`);
    this.element.style.setProperty("top", `${Math.max(MARGIN, top)}px`);
  }
}
