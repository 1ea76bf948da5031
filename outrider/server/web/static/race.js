// Plain and speculative decoding of one prompt, compared. No DOM.

import { digits, firstDifference } from "./run.js";

export const TIMES = "\u00a0×"; // stays on the line of its number

const DRAW = 0.03; // speeds closer than this are called equal

/**
 * The outcome of two complete answers. `difference`: the first token that differs, from 0, or null; `factor`: the
 * speculative speed over the plain one after the first token, or null; `winner`: "speculative", "plain", "draw" or null.
 */
export function outcome(plain, speculative) {
  const difference = firstDifference(plain, speculative);
  const [slow, fast] = [plain.figures(0).rate, speculative.figures(0).rate];
  const factor = slow && fast ? fast / slow : null;
  let winner = null;
  if (factor !== null && difference === null) {
    if (Math.abs(factor - 1) <= DRAW) winner = "draw";
    else winner = factor > 1 ? "speculative" : "plain";
  }
  return { difference, factor, winner };
}

/** The banner's heading, and the sentence below it. */
export function banner(result, plain, speculative) {
  const [slow, fast] = [plain.figures(0), speculative.figures(0)];
  const speeds = `Plain ${digits(slow.rate, 1)} tok/s, speculative ${digits(fast.rate, 1)} tok/s.`;
  if (result.difference !== null) {
    return ["The texts differ", `From token ${result.difference + 1} on. ${speeds}`];
  }
  const same = "The same text, character for character.";
  const titles = {
    speculative: `Speculative wins: ${digits(result.factor, 2)}${TIMES}`,
    plain: `Plain wins: ${digits(1 / result.factor, 2)}${TIMES}`,
    draw: "A draw",
  };
  return result.winner ? [titles[result.winner], `${same} ${speeds}`] : ["Identical", same];
}

/** How far along an answer is, from 0 to 1, where its length is known or `expected`. */
export function share(tokens, expected) {
  return expected > 0 ? Math.min(1, tokens / expected) : 0;
}
