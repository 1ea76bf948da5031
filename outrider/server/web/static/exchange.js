// What the log shows of one turn: the prompt, which can be edited, and one answer or two in a race.

import { copyButton } from "./clipboard.js";
import { button, make } from "./dom.js";

const LONG = 480; // characters, and lines, beyond which a prompt is folded
const LONG_LINES = 7;

export class Exchange {
  /** `race` is a RaceView, or null; `onEdit(prompt)` is called to send an edited prompt in this one's place. */
  constructor({ prompt, answers, race = null, onEdit }) {
    Object.assign(this, { prompt, answers, race, onEdit });
    this.element = make("article", race ? "exchange pair" : "exchange");
    this.question = make("div", "question");
    this.#showPrompt();
    const sides = make("div", "answers");
    sides.append(...answers.map((answer) => answer.element));
    this.element.append(this.question, ...(race ? [race.element] : []), sides);
  }

  tick(now) {
    for (const answer of this.answers) if (answer.run.began !== null) answer.tick(now);
    this.race?.tick(now);
  }

  #showPrompt() {
    const said = make("p", "said", this.prompt);
    const actions = make("div", "actions");
    this.editButton = button("Edit", "edit", () => this.#edit());
    actions.append(this.editButton, copyButton("Copy", () => this.prompt));
    if (this.prompt.length > LONG || this.prompt.split("\n").length > LONG_LINES) actions.prepend(fold(said));
    this.question.replaceChildren(make("h2", "visually-hidden", "You"), said, actions);
  }

  #edit() {
    const form = make("form", "edit");
    const box = make("textarea");
    box.value = this.prompt;
    box.rows = Math.min(12, this.prompt.split("\n").length + 1);
    box.setAttribute("aria-label", "Edit the prompt");
    const cancel = make("button", "quiet", "Cancel");
    cancel.type = "button";
    const note = make("p", "note", "Continues from here: what follows this message is dropped.");
    const row = make("div", "row");
    row.append(note, cancel, make("button", "", "Send"));
    form.append(box, row);
    const leave = () => {
      this.#showPrompt();
      this.editButton.focus();
    };
    cancel.addEventListener("click", leave);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (box.value.trim()) this.onEdit(box.value);
    });
    this.question.replaceChildren(form);
    box.focus();
  }
}

/** A button that folds and unfolds a long prompt; it begins folded. */
function fold(said) {
  const element = button("Show all", "down", () => set(!said.classList.contains("folded")));
  const set = (folded) => {
    said.classList.toggle("folded", folded);
    element.setAttribute("aria-expanded", !folded);
    element.lastChild.textContent = folded ? "Show all" : "Show less";
  };
  set(true);
  return element;
}
