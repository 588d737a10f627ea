/** Elements of the page. Text is always text: nothing that a worker says is ever read as markup. */

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** An HTML element with attributes (`on` has listeners) and children. */
export function make(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function draw(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/** Change an element's text only if it differs, so that screen readers and selections are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Text of which what stands between backticks is a command or a name. */
export const prose = (text) => text.split(/`([^`]+)`/).map((part, at) => (at % 2 ? make("code", {}, part) : part));

/** The same for an element that is there, changed only if its text differs. */
export function tell(element, text) {
  if (element.dataset.told === text) return;
  element.dataset.told = text;
  element.replaceChildren(...prose(text));
}

/** A term and what it is, for a `dl`. */
export function term(name, value, note = "") {
  return make("div", {}, make("dt", {}, name), make("dd", {}, make("b", {}, value), note ? make("small", {}, note) : null));
}

/** Entries of a legend: pairs of a class and a text. */
export function legend(list, entries) {
  list.replaceChildren(...entries.map(([kind, text]) => make("li", {}, make("span", { class: `key ${kind}` }), text)));
}
