// What the log shows: a prompt, and one answer or two side by side, each with its clock and metrics.

import { AnswerView } from "./answer.js";
import { digits, firstDifference, Run } from "./run.js";

/** An element with a class and, where given, text. */
export function make(name, className, text = "") {
  const element = document.createElement(name);
  element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** One answer: heading, clock, tokens, and a line of metrics below. */
export class Side {
  constructor(title, label) {
    this.run = new Run();
    this.view = new AnswerView(label);
    this.element = make("section", "side");
    this.clock = make("span", "clock", "0.00 s");
    this.foot = make("p", "foot");
    const head = make("header", "side-head");
    head.append(make("h3", "side-title", title), this.clock);
    this.element.append(head, this.view.element, this.foot);
  }

  /** Takes one chunk of the stream. */
  add(chunk, now) {
    const choice = chunk.choices[0];
    if (!choice) return;
    this.view.add(this.run.add(choice.provenance ?? [], choice.delta?.content ?? "", now));
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  tick(now) {
    this.clock.textContent = `${digits(this.run.figures(now).seconds, 2)} s`;
  }

  /** The end: metrics, and why the text ended where the model did not end it itself. */
  close(now, { seed, stopped = false }) {
    this.run.end(now);
    this.tick(now);
    this.element.classList.add("done");
    const f = this.run.figures(now);
    const parts = [`${f.tokens} tokens`, `${digits(f.rate, 1)} tok/s`, `first after ${digits(f.firstMs, 0)} ms`];
    if (f.drafted) parts.push(`α ${digits(f.alpha, 2)}`, `τ ${digits(f.tau, 2)}`);
    parts.push(`seed ${seed}`);
    if (stopped) parts.push("stopped by you");
    else if (this.finish === "length") parts.push("cut at the most tokens allowed");
    this.foot.textContent = parts.join(" · ");
  }

  fail(sentence) {
    const error = make("p", "error", sentence);
    error.setAttribute("role", "alert");
    this.element.append(error);
  }
}

/** A prompt with its answers, appended to the log. */
export class Exchange {
  constructor(log, prompt, sides) {
    this.sides = sides;
    this.element = make("article", sides.length > 1 ? "exchange pair" : "exchange");
    const question = make("div", "question");
    question.append(make("h2", "speaker", "You"), make("p", "said", prompt));
    const answers = make("div", "answers");
    answers.append(...sides.map((side) => side.element));
    this.element.append(question, answers);
    log.append(this.element);
    const said = question.lastChild;
    if (said.scrollHeight > said.clientHeight) said.tabIndex = 0; // so that keys can scroll it
  }

  /** Brings the end of the exchange into view. */
  follow() {
    this.element.scrollIntoView({ block: "end" });
  }

  /** Below two answers: whether the texts are the same, and which was faster. */
  compare(plain, speculative) {
    this.element.append(make("p", "verdict", verdict(plain.run, speculative.run)));
  }
}

function verdict(plain, speculative) {
  const at = firstDifference(plain, speculative);
  const same = at === null ? "The same text, character for character." : `The texts differ from token ${at + 1} on.`;
  const [slow, fast] = [plain.figures(0), speculative.figures(0)];
  if (!slow.rate || !fast.rate) return same;
  const times = digits(fast.rate / slow.rate, 2);
  return `${same} Speculative ${digits(fast.rate, 1)} tok/s, plain ${digits(slow.rate, 1)} tok/s: ${times} times as fast.`;
}
