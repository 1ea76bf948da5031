// One answer as it arrives: its tokens, rounds and metrics. No DOM, no network.

export const ORIGINS = {
  accepted: { name: "accepted", says: "drafted, and the target chose the same" },
  recovered: { name: "recovered", says: "the target's own, in place of a rejected token" },
  bonus: { name: "bonus", says: "the target's own, after a draft accepted whole" },
  plain: { name: "plain", says: "no draft in this round" },
};

// What is kept of a token, in this order.
const FIELDS = ["token", "token_id", "origin", "drafter", "round", "position", "drafted", "draft_prob", "target_prob"];

/** What a round drafted and how much was accepted. */
function newRound(number) {
  return { number, drafted: 0, accepted: 0, emitted: 0, last: "plain", drafter: "" };
}

/** The tokens of an answer, counted as they come. Times are milliseconds of one clock. */
export class Run {
  tokens = [];
  rounds = [];
  text = "";
  began = null;
  first = null;
  firstTokens = 0;
  ended = null;
  times = []; // [time, tokens so far] of each chunk with tokens

  begin(now) {
    this.began = now;
  }

  /** Adds the provenance entries and the text of one chunk; returns the tokens to show. */
  add(entries, content, now) {
    const shown = withLeftover(entries, content);
    this.text += content;
    if (!entries.length) return shown;
    if (this.first === null) {
      this.first = now;
      this.firstTokens = entries.length;
    }
    for (const entry of entries) this.#count(entry);
    this.tokens.push(...entries);
    this.times.push([now, this.tokens.length]);
    return shown;
  }

  end(now) {
    this.ended ??= now;
  }

  /** How many tokens had arrived so many milliseconds after the beginning. */
  tokensAt(elapsed) {
    return this.times.findLast(([time]) => time - this.began <= elapsed)?.[1] ?? 0;
  }

  /** The answer as plain data, to be kept. */
  toStored() {
    const [began, first, ended] = [this.began ?? 0, this.first, this.ended ?? this.began ?? 0];
    return {
      text: this.text,
      seconds: (ended - began) / 1000,
      firstMs: first === null ? null : first - began,
      firstTokens: this.firstTokens,
      tokens: this.tokens.map((entry) => FIELDS.map((field) => entry[field] ?? null)),
    };
  }

  /** The answer out of what `toStored` returned. */
  static fromStored({ text, seconds, firstMs, firstTokens, tokens }) {
    const run = new Run();
    run.tokens = tokens.map((values) => Object.fromEntries(FIELDS.map((field, i) => [field, values[i]])));
    for (const entry of run.tokens) run.#count(entry);
    return Object.assign(run, { text, firstTokens, began: 0, first: firstMs, ended: seconds * 1000 });
  }

  #count(entry) {
    let round = this.rounds.at(-1);
    if (round?.number !== entry.round) this.rounds.push((round = newRound(entry.round)));
    round.emitted += 1;
    round.last = entry.origin;
    if (entry.drafter) round.drafter = entry.drafter;
    if (entry.origin === "accepted") round.accepted += 1;
    round.drafted = entry.drafted;
  }

  /** The metrics so far. Rates are null where there is nothing to divide by. */
  figures(now) {
    const end = this.ended ?? now;
    const sum = (key) => this.rounds.reduce((total, round) => total + round[key], 0);
    const [drafted, accepted] = [sum("drafted"), sum("accepted")];
    const rejected = this.tokens.filter((token) => token.origin === "recovered").length;
    const seconds = this.began === null ? 0 : (end - this.began) / 1000;
    const decoding = this.first === null ? 0 : (end - this.first) / 1000;
    return {
      tokens: this.tokens.length,
      rounds: this.rounds.length,
      drafted,
      accepted,
      seconds,
      firstMs: this.first === null ? null : this.first - this.began,
      rate: ratio(this.tokens.length - this.firstTokens, decoding), // the first round's tokens have no time before them
      alpha: ratio(accepted, accepted + rejected),
      tau: ratio(this.tokens.length, this.rounds.length),
    };
  }
}

function ratio(part, whole) {
  return whole > 0 ? part / whole : null;
}

/** The entries, and one more without origin for text that no token claims (held back when a text ends early). */
export function withLeftover(entries, content) {
  const claimed = entries.map((entry) => entry.token).join("");
  const left = content.startsWith(claimed) ? content.slice(claimed.length) : "";
  return left ? [...entries, { token: left, origin: "plain" }] : entries;
}

/** Where two answers first differ, as a token count from 0; null where they are the same. */
export function firstDifference(one, other) {
  if (one.text === other.text) return null;
  const length = Math.min(one.tokens.length, other.tokens.length);
  for (let i = 0; i < length; i += 1) if (one.tokens[i].token_id !== other.tokens[i].token_id) return i;
  return length;
}

/** A figure with its digits, or a dash. */
export function digits(value, places) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(places);
}
