// The scrolling part of the conversation: it follows new text while its end is in view.

import { $ } from "./dom.js";

const NEAR = 48; // pixels from the end that still count as the end

export class Log {
  following = true;

  constructor(element) {
    this.element = element;
    element.addEventListener("scroll", () => {
      this.following = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR;
      $("to-end").hidden = this.following;
    }, { passive: true });
    $("to-end").addEventListener("click", () => this.toEnd());
  }

  append(exchange, follow) {
    this.element.append(exchange);
    if (follow) this.toEnd();
  }

  follow() {
    if (this.following) this.element.scrollTop = this.element.scrollHeight;
  }

  /** Stays where it is until it is scrolled to the end. */
  hold() {
    this.following = false;
  }

  toEnd() {
    this.following = true;
    this.follow();
  }
}
