// What speculation did for an answer, in one line. No DOM.

import { TIMES } from "./race.js";
import { digits } from "./run.js";

const COPYING = /suffix|prompt-lookup|prediction/; // drafters that copy from text they have seen
const FEW_ACCEPTED = 0.25; // drafts below this share, with little gain, are called rejected
const LITTLE_GAIN = 1.3; // tokens per pass

/**
 * The line under an answer. `off`: nothing was to be drafted; `drafter`: the server's; `race`: the outcome where the same
 * prompt was also decoded plainly, else null.
 */
export function summaryLine(figures, { off = false, drafter = "", race = null } = {}) {
  if (!figures.tokens) return "";
  const parts = [`${count(figures.tokens, "token")} in ${count(figures.rounds, "pass", "passes")}`];
  if (race?.factor) parts.push(`${digits(race.factor, 2)}${TIMES}`);
  if (race) parts.push(race.difference === null ? "identical" : `differs from token ${race.difference + 1} on`);
  const reason = whyNot(figures, { off, drafter });
  if (reason) parts.push(reason);
  else if (!race) parts.push(`${digits(figures.tau, 1)} tokens per pass`);
  return parts.join(" · ");
}

/** Why drafting did not help; empty where it did. */
export function whyNot({ tau, drafted, accepted }, { off = false, drafter = "" }) {
  if (off) return "drafting is off";
  if (!drafted) return COPYING.test(drafter) ? "nothing was drafted: no repeated text worth drafting" : "nothing was drafted";
  if (tau < LITTLE_GAIN && accepted < drafted * FEW_ACCEPTED) {
    return `drafts were rejected: ${accepted} of ${drafted} accepted`;
  }
  return "";
}

/** The smaller line below: speed, times, seed, and why the text ended where the model did not end it. */
export function detailLine(figures, { seed, stopped = false, finish = "" }) {
  const parts = figures.tokens
    ? [
        `${digits(figures.rate, 1)} tok/s`,
        `first token after ${digits(figures.firstMs, 0)} ms`,
        `${digits(figures.seconds, 2)} s`,
      ]
    : [];
  if (seed !== undefined) parts.push(`seed ${seed}`);
  if (stopped) parts.push("stopped by you");
  else if (finish === "length") parts.push("cut at max tokens");
  return parts.join(" · ");
}

function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}
