import assert from "node:assert/strict";
import test from "node:test";

const { digits, firstDifference, Run } = await import(process.env.PAGE + "/run.js");

const token = (text, origin, round, drafted = 0) => ({ token: text, token_id: text.length, origin, round, drafted, drafter: "" });

function finished() {
  const run = new Run();
  run.begin(1000);
  run.add([token("a", "plain", 0)], "a", 1500);
  run.add([token("b", "accepted", 1, 4), token("c", "accepted", 1, 4), token("d", "recovered", 1, 4)], "bcd", 2000);
  run.add([token("e", "accepted", 2, 1), token("f", "bonus", 2, 1)], "ef", 2500);
  run.end(2500);
  return run;
}

test("figures of an answer", () => {
  const figures = finished().figures(9999);
  assert.equal(figures.tokens, 6);
  assert.equal(figures.rounds, 3);
  assert.equal(figures.drafted, 5);
  assert.equal(figures.accepted, 3);
  assert.equal(figures.alpha, 3 / 4); // three accepted, one rejected
  assert.equal(figures.tau, 2); // six tokens in three passes
  assert.equal(figures.firstMs, 500);
  assert.equal(figures.seconds, 1.5); // the clock stands still after the end
  assert.equal(figures.rate, 5); // five tokens in the second after the first
});

test("nothing yet: no rate, no ratio", () => {
  const figures = new Run().figures(5);
  assert.deepEqual([figures.rate, figures.alpha, figures.tau, figures.firstMs], [null, null, null, null]);
  assert.equal(digits(figures.rate, 1), "–");
});

test("text that no token claims is shown all the same", () => {
  const run = new Run();
  const shown = run.add([token("ab", "plain", 0)], "ab held back", 0);
  assert.deepEqual(shown.map((each) => each.token), ["ab", " held back"]);
  assert.equal(run.tokens.length, 1);
  assert.equal(run.text, "ab held back");
});

test("a token split over two chunks of one round stays in one round", () => {
  const run = new Run();
  run.add([token("a", "accepted", 7, 2)], "a", 0);
  run.add([token("b", "bonus", 7, 2)], "b", 1);
  assert.equal(run.rounds.length, 1);
  assert.equal(run.rounds[0].emitted, 2);
});

test("where two answers part", () => {
  const [one, other] = [finished(), finished()];
  assert.equal(firstDifference(one, other), null);
  other.add([token("longer", "plain", 3)], "longer", 3000);
  assert.equal(firstDifference(one, other), 6);
  const third = new Run();
  third.add([token("xx", "plain", 0)], "xx", 0);
  assert.equal(firstDifference(one, third), 0);
});
