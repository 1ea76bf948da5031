// One answer on the page: the model's name, the text as Markdown or as tokens, and what speculation did.

import { copyButton } from "./clipboard.js";
import { button, make } from "./dom.js";
import { MarkdownView } from "./markdown_view.js";
import { Run, withLeftover } from "./run.js";
import { detailLine, summaryLine, whyNot } from "./summary.js";
import { TokensView } from "./tokens_view.js";

export class Answer {
  run = new Run();
  markdown = new MarkdownView();
  tokens = null; // built when it is first looked at
  race = null; // the outcome, where the same prompt was also decoded plainly

  /** `about`: { name, model, off, drafter }, kept with the answer; `onAgain`: called to write it again. */
  constructor(about, { label, tokens = false, onAgain }) {
    Object.assign(this, { about, label });
    this.element = make("section", "answer waiting");
    this.element.setAttribute("aria-label", label);
    const head = make("header", "answer-head");
    head.append(make("h3", "model", about.model), make("span", "name", about.name));
    this.body = make("div", "body");
    this.body.append(this.markdown.element);
    this.summary = make("p", "summary");
    this.detail = make("p", "detail");
    this.actions = make("div", "actions");
    this.actions.hidden = true;
    this.actions.append(copyButton("Copy answer", () => this.run.text));
    this.again = button("Regenerate", "again", onAgain);
    this.again.classList.add("again");
    this.actions.append(this.again);
    this.element.append(head, this.body, this.summary, this.detail, this.actions);
    this.show(tokens);
  }

  /** Takes one chunk of the stream. */
  add(chunk, now) {
    const choice = chunk.choices[0];
    if (!choice) return;
    const content = choice.delta?.content ?? "";
    const pieces = this.run.add(choice.provenance ?? [], content, now);
    this.tokens?.add(pieces);
    this.markdown.push(content);
    if (content || pieces.length) this.element.classList.remove("waiting");
    if (choice.finish_reason) this.about.finish = choice.finish_reason;
  }

  /** Shows the text as tokens, or as Markdown. */
  show(tokens) {
    if (tokens && !this.tokens) {
      this.tokens = new TokensView(this.label);
      this.tokens.add(withLeftover(this.run.tokens, this.run.text));
    }
    this.body.replaceChildren(tokens ? this.tokens.element : this.markdown.element);
  }

  tick(now) {
    const figures = this.run.figures(now);
    this.summary.textContent = summaryLine(figures, { ...this.about, race: this.race });
    this.summary.classList.toggle("flat", whyNot(figures, this.about) !== "");
  }

  /** The end; `about` says how it came: { seed, stopped }. */
  close(now, about = {}) {
    Object.assign(this.about, about);
    this.run.end(now);
    this.markdown.end();
    this.tick(now);
    this.detail.textContent = detailLine(this.run.figures(now), this.about);
    this.element.classList.remove("waiting");
    this.actions.hidden = !this.run.text;
  }

  /** The outcome of the race that this answer was part of. */
  place(race) {
    this.race = race;
    this.tick(0);
  }

  fail(sentence) {
    this.about.error = sentence;
    const error = make("p", "error", sentence);
    error.setAttribute("role", "alert");
    this.detail.after(error);
  }

  toStored() {
    return { ...this.about, run: this.run.toStored() };
  }

  /** An answer as it was kept. */
  static fromStored({ run, ...about }, options) {
    const answer = new Answer(about, options);
    answer.run = Run.fromStored(run);
    answer.markdown.push(run.text);
    if (answer.tokens) answer.tokens.add(withLeftover(answer.run.tokens, run.text));
    if (about.error) answer.fail(about.error);
    answer.close(0);
    return answer;
  }
}
