// Elements and buttons.

import { svg } from "./svg.js";

const ICONS = {
  menu: "M3 5h14M3 10h14M3 15h14",
  sliders: "M3 6h7m4 0h3M3 14h3m4 0h7M12 4v4M8 12v4",
  theme: "M16 12.5A7 7 0 1 1 8 4a5.5 5.5 0 0 0 8 8.5z",
  plus: "M10 4v12M4 10h12",
  close: "M5 5l10 10M15 5L5 15",
  copy: "M7 7h9v9H7zM4 13V4h9",
  again: "M16 10a6 6 0 1 1-2-4.5M16 3v4h-4",
  edit: "M4 16l1-4 8-8 3 3-8 8zM11 6l3 3",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  down: "M10 4v12M5 11l5 5 5-5",
  more: "M4.5 10h.01M10 10h.01M15.5 10h.01",
};

export const $ = (id) => document.getElementById(id);

/** An element with a class and, where given, text. */
export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** An icon, for the eyes only. */
export function icon(name) {
  const drawing = svg("svg", { viewBox: "0 0 20 20", class: "icon", "aria-hidden": "true" });
  drawing.append(svg("path", { d: ICONS[name] }));
  return drawing;
}

/** A button with an icon and a label. */
export function button(label, iconName, onClick) {
  const element = make("button", "tool");
  element.type = "button";
  element.append(icon(iconName), make("span", "", label));
  element.addEventListener("click", onClick);
  return element;
}

/** Puts the icon that its data-icon names before the content of each button of the page. */
export function drawIcons() {
  for (const element of document.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
}
