// The conversation on the page: send, stop, regenerate, edit, race; each turn is kept by the store.

import { Answer } from "./answer.js";
import { words } from "./api.js";
import { historyOf, newConversation, titleOf } from "./conversation.js";
import { Exchange } from "./exchange.js";
import { RaceView } from "./race_view.js";
import { randomSeed } from "./settings.js";

const TICK = 60; // milliseconds between drawings of clocks and figures
const now = () => performance.now();

export class Session {
  conversation = newConversation();
  exchanges = []; // those on the page
  stop = null; // the AbortController of the answers being written; null when idle
  #removed = new Set(); // ids of conversations deleted since
  #tokens = false; // whether answers are shown as tokens

  /** `page` holds { api, settings, store, figures, announcer, composer, log }; `on` the callbacks of app.js. */
  constructor(page, on) {
    Object.assign(this, page);
    this.on = on; // { ready() -> boolean, kept(), busy(boolean), needsKey(), server() -> { model, drafter } }
  }

  get answers() {
    return this.exchanges.flatMap((exchange) => exchange.answers);
  }

  get lastPrompt() {
    return this.exchanges.at(-1)?.prompt ?? "";
  }

  /** Sends a prompt; false where an answer is still being written, or a setting is out of range. */
  send(prompt, kind) {
    if (this.stop || !this.on.ready()) return false;
    this.#drop(this.exchanges.filter((exchange) => exchange.failed));
    this.announcer.clear();
    if (kind === "race") this.#race(prompt);
    else this.#chat(prompt);
    return true;
  }

  abort() {
    this.stop?.abort();
  }

  /** Drops an exchange and those after it, and sends a prompt in its place. */
  resend(exchange, prompt) {
    if (this.stop || !this.on.ready()) return;
    this.#drop(this.exchanges.slice(this.exchanges.indexOf(exchange)));
    this.send(prompt, exchange.race ? "race" : "chat");
  }

  /** Shows a kept conversation, or a new one where there is none of this id. */
  open(id) {
    this.abort();
    this.conversation = this.store.load(id) ?? newConversation();
    for (const exchange of this.exchanges) exchange.element.remove();
    this.exchanges = [];
    for (const turn of this.conversation.turns) this.#restore(turn);
    this.figures.show(this.answers.at(-1) ?? null, 0);
    this.log.toEnd();
  }

  /** A conversation was deleted. */
  forget(id) {
    this.#removed.add(id);
    if (id === this.conversation.id) this.open("");
  }

  showTokens(on) {
    this.#tokens = on;
    for (const answer of this.answers) answer.show(on);
  }

  #drop(exchanges) {
    for (const exchange of exchanges) exchange.element.remove();
    this.exchanges = this.exchanges.filter((exchange) => !exchanges.includes(exchange));
    const turns = exchanges.map((exchange) => exchange.turn);
    this.conversation.turns = this.conversation.turns.filter((turn) => !turns.includes(turn));
  }

  async #chat(prompt) {
    const answer = this.#answer("", this.settings.off);
    const messages = [...this.settings.system(), ...historyOf(this.conversation.turns), { role: "user", content: prompt }];
    const exchange = this.#add({ prompt, answers: [answer] });
    const body = { ...this.settings.sampling(), messages, speculation: this.settings.speculation() };
    const went = await this.#busy(exchange, (signal) => this.#write(answer, body, signal));
    if (answer.run.text) this.#keep(exchange);
    else if (!went) this.#fail(exchange);
  }

  /** The same prompt and seed twice, each with a cache salt of its own. */
  async #race(prompt) {
    const pair = [this.#answer("plain", true), this.#answer("speculative", false)];
    const exchange = this.#add({ prompt, answers: pair, race: new RaceView(pair, this.settings.maxTokens) });
    const messages = [...this.settings.system(), { role: "user", content: prompt }];
    const [common, salt] = [{ ...this.settings.sampling(), messages }, randomSeed()];
    const bodies = pair.map((answer, i) => {
      return { ...common, cache_salt: `page-${salt}-${i}`, speculation: this.settings.speculation(answer.about.off) };
    });
    const write = (i, signal) => this.#write(pair[i], bodies[i], signal);
    let complete = false;
    const went = await this.#busy(exchange, async (signal) => {
      if (this.composer.together) await Promise.all([write(0, signal), write(1, signal)]);
      else for (const i of [0, 1]) await write(i, signal);
      complete = true;
    });
    if (complete) {
      exchange.race.finish();
      this.log.follow();
      this.#keep(exchange);
    } else if (!went) this.#fail(exchange);
  }

  /** Requests one answer and shows it as it arrives. Throws on an error; what has arrived stays shown. */
  async #write(answer, body, signal) {
    answer.run.begin(now());
    this.figures.show(answer, now());
    try {
      for await (const chunk of this.api.chat({ ...body, include_provenance: true }, signal)) {
        answer.add(chunk, now());
        if (answer === this.figures.answer) this.announcer.add(chunk.choices[0]?.delta?.content ?? "");
      }
    } catch (error) {
      if (error.name !== "AbortError") answer.fail(words(error));
      throw error;
    } finally {
      answer.close(now(), { seed: body.seed, stopped: signal.aborted });
    }
  }

  /** Runs `work(signal)` with the Stop button in place and the clocks moving; false where it failed. */
  async #busy(exchange, work) {
    const stop = (this.stop = new AbortController());
    this.#setBusy(true);
    const tick = () => {
      exchange.tick(now());
      this.figures.draw(now());
      this.log.follow();
    };
    const timer = setInterval(tick, TICK);
    try {
      await work(stop.signal);
      return true;
    } catch (error) {
      if (error.status === 401) this.on.needsKey();
      return error.name === "AbortError";
    } finally {
      clearInterval(timer);
      stop.abort(); // where one of two fails, the other is stopped
      this.stop = null;
      this.#setBusy(false);
      tick();
      this.announcer.flush();
    }
  }

  #setBusy(on) {
    this.composer.setBusy(on);
    this.on.busy(on);
  }

  #answer(name, off) {
    const { model, drafter } = this.on.server();
    const label = `${name ? `${name[0].toUpperCase()}${name.slice(1)} answer` : "Answer"} ${this.answers.length + 1}`;
    return new Answer({ name, model, off, drafter }, this.#options(label));
  }

  #options(label) {
    const onAgain = (event) => {
      const exchange = this.exchanges.find((each) => each.element.contains(event.currentTarget));
      this.resend(exchange, exchange.prompt);
    };
    return { label, tokens: this.#tokens, onAgain };
  }

  #add(parts, follow = true) {
    const exchange = new Exchange({ ...parts, onEdit: (prompt) => this.resend(exchange, prompt) });
    exchange.conversation = this.conversation;
    this.exchanges.push(exchange);
    this.log.append(exchange.element, follow);
    return exchange;
  }

  #restore(turn) {
    const label = (i) => `Answer ${this.answers.length + i + 1}`;
    const answers = turn.answers.map((stored, i) => Answer.fromStored(stored, this.#options(label(i))));
    const race = turn.kind === "race" ? new RaceView(answers, 0) : null;
    this.#add({ prompt: turn.prompt, answers, race }, false).turn = turn;
    race?.restore(turn.shares ?? [1, 1]);
  }

  /** Adds an exchange to its conversation, which may no longer be the one on the page. */
  #keep(exchange) {
    const { conversation, prompt, race, answers } = exchange;
    if (this.#removed.has(conversation.id)) return;
    exchange.turn = {
      kind: race ? "race" : "chat",
      prompt,
      answers: answers.map((answer) => answer.toStored()),
      ...(race ? { shares: race.shares } : {}),
    };
    conversation.title ||= titleOf(prompt);
    conversation.turns.push(exchange.turn);
    conversation.updated = Date.now();
    this.store.save(conversation);
    this.on.kept();
  }

  /** Nothing came of it: the prompt goes back to the box, and the exchange goes when the next one is sent. */
  #fail(exchange) {
    exchange.failed = true;
    if (exchange.conversation === this.conversation) this.composer.giveBack(exchange.prompt);
  }
}
