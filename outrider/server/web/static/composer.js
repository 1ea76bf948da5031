// The box for prompts: it grows with its text, Enter sends, the up arrow recalls the last message.

import { $ } from "./dom.js";

export class Composer {
  /** `onSend(prompt, kind)`, `onStop()`; `last()` is the last message of the conversation, or "". */
  constructor({ onSend, onStop, last }) {
    this.box = $("prompt");
    Object.assign(this, { onSend, last });
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.box.addEventListener("input", () => this.#grow());
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
      if (event.key === "Escape") onStop();
      if (event.key === "ArrowUp" && this.box.value === "" && this.last()) {
        event.preventDefault();
        this.fill(this.last());
      }
    });
    $("stop").addEventListener("click", onStop);
    for (const radio of document.getElementsByName("mode")) {
      radio.addEventListener("change", () => ($("together-row").hidden = !$("mode-race").checked));
    }
  }

  /** "chat" or "race". */
  get kind() {
    return $("mode-race").checked ? "race" : "chat";
  }

  /** Whether the two answers of a race are requested at once. */
  get together() {
    return $("together").checked;
  }

  fill(text) {
    this.box.value = text;
    this.#grow();
    this.focus();
    this.box.setSelectionRange(text.length, text.length);
  }

  /** After an error: the prompt again, unless something else was written since. */
  giveBack(prompt) {
    if (!this.box.value) this.fill(prompt);
  }

  focus() {
    this.box.focus();
  }

  setBusy(on) {
    const hadFocus = document.activeElement === $("stop");
    $("send").hidden = on;
    $("stop").hidden = !on;
    if (hadFocus) this.focus();
  }

  #send() {
    const prompt = this.box.value;
    if (!prompt.trim() || !this.onSend(prompt, this.kind)) return;
    this.box.value = "";
    this.#grow();
  }

  #grow() {
    this.box.style.setProperty("height", "auto");
    this.box.style.setProperty("height", `${this.box.scrollHeight}px`); // up to the style sheet's max-height
  }
}
