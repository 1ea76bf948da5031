// Announces an answer to screen readers, a sentence at a time: token by token would be noise.

const SENTENCE = /^[\s\S]*?[.!?:]\s+|^[\s\S]*?\n+/;

/** Splits the text so far into complete sentences and the rest. */
export function sentences(text) {
  const whole = [];
  let rest = text;
  for (let match = SENTENCE.exec(rest); match; match = SENTENCE.exec(rest)) {
    if (match[0].trim()) whole.push(match[0].trim());
    rest = rest.slice(match[0].length);
  }
  return { whole, rest };
}

export class Announcer {
  #rest = "";

  constructor(element) {
    this.element = element;
  }

  clear() {
    this.#rest = "";
    this.element.replaceChildren();
  }

  add(text) {
    const { whole, rest } = sentences(this.#rest + text);
    this.#rest = rest;
    whole.forEach((sentence) => this.say(sentence));
  }

  /** Announces the rest of an answer. */
  flush() {
    if (this.#rest.trim()) this.say(this.#rest.trim());
    this.#rest = "";
  }

  say(sentence) {
    const line = document.createElement("p");
    line.textContent = sentence;
    this.element.append(line);
  }
}
