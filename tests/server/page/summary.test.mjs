import assert from "node:assert/strict";
import test from "node:test";

const { detailLine, summaryLine } = await import(process.env.PAGE + "/summary.js");
const { banner, outcome, share } = await import(process.env.PAGE + "/race.js");
const { Run } = await import(process.env.PAGE + "/run.js");

const figures = (tokens, rounds, drafted, accepted) => ({ tokens, rounds, drafted, accepted, tau: tokens / rounds });

test("what speculation did, in one line", () => {
  const good = figures(70, 22, 60, 48);
  assert.equal(summaryLine(good), "70 tokens in 22 passes · 3.2 tokens per pass");
  assert.equal(summaryLine(good, { race: { factor: 1.857, difference: null } }), "70 tokens in 22 passes · 1.86\u00a0× · identical");
  assert.equal(
    summaryLine(good, { race: { factor: 1.857, difference: 11 } }),
    "70 tokens in 22 passes · 1.86\u00a0× · differs from token 12 on",
  );
  assert.equal(summaryLine(good, { race: { factor: null, difference: null } }), "70 tokens in 22 passes · identical");
  assert.equal(summaryLine(figures(1, 1, 2, 1)), "1 token in 1 pass · 1.0 tokens per pass");
  assert.equal(summaryLine(figures(0, 0, 0, 0)), "");
});

test("and why it did not help", () => {
  const none = figures(70, 70, 0, 0);
  assert.equal(summaryLine(none, { off: true, drafter: "suffix" }), "70 tokens in 70 passes · drafting is off");
  const copied = "70 tokens in 70 passes · nothing was drafted: no repeated text worth drafting";
  assert.equal(summaryLine(none, { drafter: "suffix+prediction" }), copied);
  assert.equal(summaryLine(none, { drafter: "draft-model" }), "70 tokens in 70 passes · nothing was drafted");
  const rejected = "70 tokens in 67 passes · drafts were rejected: 3 of 40 accepted";
  assert.equal(summaryLine(figures(70, 67, 40, 3), { drafter: "suffix" }), rejected);
  assert.equal(summaryLine(figures(70, 30, 400, 40), {}), "70 tokens in 30 passes · 2.3 tokens per pass"); // it did help
  const lost = "70 tokens in 70 passes · 0.95\u00a0× · identical · drafting is off";
  assert.equal(summaryLine(none, { off: true, race: { factor: 0.95, difference: null } }), lost);
});

test("speed, times, and how it ended", () => {
  const f = { tokens: 5, rate: 18.234, firstMs: 119.6, seconds: 3.919 };
  assert.equal(detailLine(f, { seed: 7 }), "18.2 tok/s · first token after 120 ms · 3.92 s · seed 7");
  assert.match(detailLine(f, { seed: 7, stopped: true, finish: "length" }), /seed 7 · stopped by you$/);
  assert.match(detailLine(f, { finish: "length" }), /3\.92 s · cut at max tokens$/);
  assert.equal(detailLine({ tokens: 0 }, { seed: 7 }), "seed 7");
});

/** An answer with these texts as tokens, one each `step` milliseconds. */
function answer(texts, step) {
  const run = new Run();
  run.begin(1000);
  texts.forEach((token, i) => {
    const place = { token_id: token.charCodeAt(0), origin: "plain", round: i, position: 0, drafted: 0, drafter: "" };
    run.add([{ token, ...place }], token, 1000 + step * (i + 1));
  });
  run.end(1000 + step * texts.length);
  return run;
}

test("the winner of a race, and by how much", () => {
  const [slow, fast] = [answer([..."abcde"], 30), answer([..."abcde"], 20)];
  assert.deepEqual(outcome(slow, fast), { difference: null, factor: 1.5, winner: "speculative" });
  assert.deepEqual(banner(outcome(slow, fast), slow, fast), [
    "Speculative wins: 1.50\u00a0×",
    "The same text, character for character. Plain 33.3 tok/s, speculative 50.0 tok/s.",
  ]);
  assert.equal(outcome(fast, slow).winner, "plain");
  assert.equal(banner(outcome(fast, slow), fast, slow)[0], "Plain wins: 1.50\u00a0×");
  assert.equal(outcome(fast, answer([..."abcde"], 20.2)).winner, "draw");
});

test("texts that differ have no winner, and one round has no speed", () => {
  const [one, other] = [answer([..."abcde"], 30), answer([..."abxde"], 20)];
  assert.deepEqual(outcome(one, other), { difference: 2, factor: 1.5, winner: null });
  assert.match(banner(outcome(one, other), one, other).join(" "), /^The texts differ From token 3 on\./);
  const [short, same] = [answer(["a"], 30), answer(["a"], 20)];
  assert.deepEqual(outcome(short, same), { difference: null, factor: null, winner: null });
  assert.equal(banner(outcome(short, same), short, same)[0], "Identical");
});

test("how far along an answer was", () => {
  const run = answer([..."abcde"], 30);
  assert.deepEqual([0, 29, 30, 95, 999].map((elapsed) => run.tokensAt(elapsed)), [0, 0, 1, 3, 5]);
  assert.deepEqual([share(5, 20), share(30, 20), share(3, 0)], [0.25, 1, 0]);
});
