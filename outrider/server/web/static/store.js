// What the browser keeps: conversations and settings. Where its storage is full or forbidden, memory takes its place until
// the tab closes, and `problem` says so. No DOM.

import { isConversation } from "./conversation.js";

const INDEX = "outrider-conversations"; // [{ id, title, updated }], newest first
const CONVERSATION = "outrider-conversation-"; // + id
const SETTINGS = "outrider-settings";

const FORBIDDEN = "This browser does not let the page keep conversations: they are lost when the tab closes.";
const FULL = "The browser's storage is full: new text is lost when the tab closes. Export or delete older conversations.";

export class Store {
  problem = "";
  #memory = new Map(); // what could not be written

  /** `open()` returns a Storage, or throws where there is none. */
  constructor(open) {
    try {
      this.storage = open();
      this.storage.getItem(INDEX);
    } catch {
      this.storage = null;
      this.problem = FORBIDDEN;
    }
  }

  /** { id, title, updated } of each conversation, newest first. */
  list() {
    const known = this.#read(INDEX);
    return Array.isArray(known) ? known.filter((each) => typeof each?.id === "string") : [];
  }

  /** A conversation, or null where it is not there or not readable. */
  load(id) {
    const found = this.#read(CONVERSATION + id);
    return isConversation(found) ? found : null;
  }

  save(conversation) {
    const { id, title, updated } = conversation;
    this.#write(CONVERSATION + id, conversation);
    this.#write(INDEX, [{ id, title, updated }, ...this.list().filter((each) => each.id !== id)]);
  }

  /** A new title; the place in the list stays. */
  rename(id, title) {
    const conversation = this.load(id);
    if (conversation) this.#write(CONVERSATION + id, { ...conversation, title });
    this.#write(INDEX, this.list().map((each) => (each.id === id ? { ...each, title } : each)));
  }

  remove(id) {
    this.#memory.delete(CONVERSATION + id);
    this.storage?.removeItem(CONVERSATION + id);
    this.#write(INDEX, this.list().filter((each) => each.id !== id));
    this.#retry();
  }

  settings() {
    const found = this.#read(SETTINGS);
    return found !== null && typeof found === "object" ? found : {};
  }

  saveSettings(values) {
    this.#write(SETTINGS, values);
  }

  #read(key) {
    if (this.#memory.has(key)) return JSON.parse(this.#memory.get(key));
    try {
      return JSON.parse(this.storage?.getItem(key) ?? "null");
    } catch {
      return null; // not written by this page
    }
  }

  #write(key, value) {
    const text = JSON.stringify(value);
    this.#memory.delete(key);
    try {
      if (this.storage) return this.storage.setItem(key, text);
    } catch {
      this.problem = FULL;
    }
    return this.#memory.set(key, text);
  }

  /** After something was deleted: writes what had found no room. */
  #retry() {
    if (!this.storage || !this.#memory.size) return;
    this.problem = "";
    for (const [key, text] of [...this.#memory]) this.#write(key, JSON.parse(text));
  }
}
