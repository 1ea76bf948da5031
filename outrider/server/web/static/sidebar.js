// The list of conversations: open, rename, export, delete.

import { download } from "./clipboard.js";
import { fileName, toJson, toMarkdown } from "./conversation.js";
import { $, icon, make } from "./dom.js";

export class Sidebar {
  /** `onOpen(id)` opens a conversation; `onRemove(id)` and `onRename(id, title)` are called after the store knows. */
  constructor(store, { onOpen, onRemove, onRename }) {
    Object.assign(this, { store, onOpen, onRemove, onRename });
    this.list = $("conversations");
    document.addEventListener("click", (event) => this.#closeMenus(event.target));
    this.list.addEventListener("keydown", (event) => {
      const menu = event.target.closest("details[open]");
      if (event.key !== "Escape" || !menu) return;
      event.stopPropagation();
      menu.open = false;
      menu.firstElementChild.focus();
    });
    window.addEventListener("storage", () => { // another tab wrote
      if (!this.list.querySelector("input")) this.show(this.current);
    });
  }

  /** Lists the conversations; `current` is the id of the one on the page. */
  show(current) {
    this.current = current;
    const all = this.store.list();
    this.list.replaceChildren(...all.map((each) => this.#row(each)));
    $("no-conversations").hidden = all.length > 0;
    $("storage-problem").textContent = this.store.problem;
    $("storage-problem").hidden = !this.store.problem;
  }

  #row({ id, title }) {
    const row = make("li", id === this.current ? "current" : "");
    const open = make("button", "open", title || "Untitled");
    open.type = "button";
    if (id === this.current) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this.onOpen(id));
    row.append(open, this.#menu(id, title, row));
    return row;
  }

  #menu(id, title, row) {
    const menu = make("details", "menu");
    const summary = make("summary");
    summary.setAttribute("aria-label", `More for ${title || "Untitled"}`);
    summary.append(icon("more"));
    const box = make("div", "menu-box");
    const choice = (label, act) => {
      const element = make("button", "", label);
      element.type = "button";
      element.addEventListener("click", () => {
        menu.open = false;
        act();
      });
      box.append(element);
    };
    choice("Rename", () => this.#rename(id, title, row));
    choice("Export as JSON", () => this.#export(id, "json", toJson, "application/json"));
    choice("Export as Markdown", () => this.#export(id, "md", toMarkdown, "text/markdown"));
    choice("Delete", () => this.#remove(id));
    menu.append(summary, box);
    return menu;
  }

  #rename(id, title, row) {
    const input = make("input");
    input.value = title;
    input.setAttribute("aria-label", "Title");
    let left = false; // removing the input blurs it once more
    const leave = (keep) => {
      if (left) return;
      left = true;
      const given = input.value.trim();
      if (keep && given) {
        this.store.rename(id, given);
        this.onRename(id, given);
      }
      this.show(this.current);
    };
    input.addEventListener("blur", () => leave(true));
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") leave(true);
      if (event.key !== "Escape") return;
      event.stopPropagation(); // the list stays open
      leave(false);
    });
    row.replaceChildren(input);
    input.select();
  }

  #export(id, extension, write, type) {
    const conversation = this.store.load(id);
    if (conversation) download(fileName(conversation, extension), write(conversation), type);
  }

  #remove(id) {
    this.store.remove(id);
    this.onRemove(id);
    this.show(this.current);
    (this.list.querySelector(".open") ?? $("new")).focus();
  }

  #closeMenus(target) {
    for (const menu of this.list.querySelectorAll("details[open]")) if (!menu.contains(target)) menu.open = false;
  }
}
