// The figures and rounds of one answer, beside the conversation.

import { $ } from "./dom.js";
import { digits } from "./run.js";
import { Strip } from "./strip.js";

export class Figures {
  answer = null; // the one shown

  constructor() {
    this.strip = new Strip($("strip"), $("strip-caption"), (round) => this.answer?.tokens?.mark(round));
  }

  /** Shows an answer, or none. */
  show(answer, now) {
    this.answer = answer;
    this.draw(now);
  }

  draw(now) {
    const run = this.answer?.run;
    $("answer-figures").hidden = !run;
    $("no-answer").hidden = Boolean(run);
    this.strip.show(run?.rounds ?? []);
    const f = run?.figures(now) ?? {};
    const said = {
      rate: digits(f.rate, 1),
      alpha: digits(f.alpha, 2),
      tau: digits(f.tau, 2),
      tokens: f.tokens ?? "–",
      rounds: f.rounds ?? "–",
      drafted: f.drafted ?? "–",
      accepted: f.accepted ?? "–",
      first: digits(f.firstMs, 0),
      clock: digits(f.seconds, 2),
    };
    for (const [name, text] of Object.entries(said)) $(`figure-${name}`).textContent = text;
  }
}
