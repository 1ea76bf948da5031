// A part of the page beside the conversation: in its own column on a wide window, over the page on a narrow one.

import { $ } from "./dom.js";

export class Drawer {
  /** `opener`: the button that shows and hides it; `wide`: the media query of windows with room for a column. */
  constructor(element, opener, wide) {
    Object.assign(this, { element, opener, wide: matchMedia(wide) });
    opener.setAttribute("aria-controls", element.id);
    opener.addEventListener("click", () => this.toggle());
    element.querySelector(".close").addEventListener("click", () => this.close());
    $("backdrop").addEventListener("click", () => this.#leave());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.#leave());
    this.wide.addEventListener("change", () => this.set(this.wide.matches));
    this.set(this.wide.matches);
  }

  get open() {
    return !this.element.hidden;
  }

  toggle() {
    if (this.open) this.close();
    else this.set(true, true);
  }

  close() {
    this.set(false);
    this.opener.focus();
  }

  /** Shows or hides it. Over the page, the rest of the page is out of reach. */
  set(open, focus = false) {
    const over = open && !this.wide.matches;
    this.element.hidden = !open;
    this.element.classList.toggle("over", over);
    this.opener.setAttribute("aria-expanded", open);
    const others = [...this.element.parentElement.children].filter((each) => each !== this.element);
    for (const each of others) each.inert = over && each !== $("backdrop");
    $("backdrop").hidden = !over;
    if (over && focus) this.element.querySelector("button, input, select").focus();
  }

  /** Closes it where it lies over the page. */
  leave() {
    if (this.open && !this.wide.matches) this.set(false);
  }

  #leave() {
    if (this.open && !this.wide.matches) this.close();
  }
}

/** Tabs by their buttons, moved through with the arrow keys. */
export class Tabs {
  constructor(list) {
    this.buttons = [...list.querySelectorAll("[role=tab]")];
    for (const each of this.buttons) each.addEventListener("click", () => this.select(each.id));
    list.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const at = this.buttons.findIndex((each) => each === document.activeElement);
      const next = this.buttons.at((at + step) % this.buttons.length);
      this.select(next.id);
      next.focus();
    });
    this.select(this.buttons[0].id);
  }

  select(id) {
    for (const each of this.buttons) {
      const chosen = each.id === id;
      each.setAttribute("aria-selected", chosen);
      each.tabIndex = chosen ? 0 : -1;
      $(each.getAttribute("aria-controls")).hidden = !chosen;
    }
  }
}
