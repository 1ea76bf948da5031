// Two answers as a race: a lane for each, advancing with its tokens, and a banner with the winner.

import { make } from "./dom.js";
import { banner, outcome, share } from "./race.js";
import { digits } from "./run.js";

export class RaceView {
  /** `pair`: the plain and the speculative answer; `expected`: tokens, until one of them is complete. */
  constructor(pair, expected) {
    Object.assign(this, { pair, expected });
    this.element = make("div", "race");
    this.lanes = pair.map((answer) => lane(answer.about.name));
    this.banner = make("div", "banner");
    this.banner.setAttribute("role", "status");
    this.element.append(...this.lanes.map((each) => each.element), this.banner);
  }

  /** Moves the lanes. Where the answers come one after the other, the first is shown again beside the second. */
  tick(now) {
    const [first, second] = this.pair.map((answer) => answer.run);
    const whole = [first, second].find((run) => run.ended !== null)?.tokens.length ?? this.expected;
    const replay = first.ended !== null && second.began !== null && second.began >= first.ended;
    const elapsed = replay ? (second.ended ?? now) - second.began : Infinity;
    const counts = [replay ? first.tokensAt(elapsed) : first.tokens.length, second.tokens.length];
    this.shares = counts.map((tokens) => share(tokens, whole));
    this.lanes.forEach((each, i) => this.#move(each, this.shares[i], this.pair[i].run.figures(now)));
  }

  #move({ track, figures }, part, { rate, seconds }) {
    track.style.setProperty("--share", part);
    track.setAttribute("aria-valuenow", Math.round(part * 100));
    figures.textContent = `${digits(rate, 1)} tok/s · ${digits(seconds, 2)} s`;
  }

  /** Both are complete: the winner, and whether the texts are identical. */
  finish() {
    const [plain, speculative] = this.pair;
    const result = outcome(plain.run, speculative.run);
    const [title, sentence] = banner(result, plain.run, speculative.run);
    const same = result.difference === null;
    this.banner.replaceChildren(
      make("strong", "", title),
      make("span", `chip ${same ? "same" : "different"}`, same ? "identical" : "not identical"),
      make("p", "", sentence),
    );
    this.banner.dataset.winner = result.winner ?? "";
    this.lanes.forEach((each, i) => {
      each.element.classList.toggle("won", ["plain", "speculative"][i] === result.winner);
    });
    speculative.place(result);
  }

  /** A race as it was kept: how far each lane was at the end. */
  restore(shares) {
    this.shares = shares;
    this.lanes.forEach((each, i) => this.#move(each, shares[i] ?? 1, this.pair[i].run.figures(0)));
    this.finish();
  }
}

function lane(name) {
  const element = make("div", `lane ${name}`);
  const track = make("div", "track");
  track.setAttribute("role", "progressbar");
  track.setAttribute("aria-label", `${name} decoding`);
  track.setAttribute("aria-valuenow", 0);
  track.append(make("div", "fill"));
  const figures = make("span", "lane-figures", "");
  element.append(make("span", "lane-name", name), figures, track);
  return { element, track, figures };
}
