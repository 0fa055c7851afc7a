// Elements, tables and times. Text of others (topics, reasons, payloads) only ever becomes a text node.

export const byId = id => document.getElementById(id);

/** make('p', {className: 'quiet', title: 'x'}, 'text', element): properties by name, attributes with '-' or in `role`. */
export function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes('-') || name === 'role') made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

// Values

const WHOLE = new Intl.NumberFormat('en');
const SHORT = new Intl.NumberFormat('en', {notation: 'compact'});
const BYTES = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export const count = value => (typeof value === 'number' ? WHOLE.format(value) : '');

export function rate(perSecond) {
  if (!perSecond) return '0/s';
  if (perSecond < 0.1) return '<0.1/s';
  if (perSecond < 9.95) return `${perSecond.toFixed(1)}/s`;
  return `${(perSecond < 1e4 ? WHOLE : SHORT).format(Math.round(perSecond)).replace('K', 'k')}/s`;
}

export function bytes(value) {
  if (typeof value !== 'number') return '';
  let unit = 0;
  while (value >= 1024 && unit < BYTES.length - 1) { value /= 1024; unit++; }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${BYTES[unit]}`;
}

export function duration(seconds) {
  if (seconds < 1) return '0 s';
  for (const [length, unit] of [[86400, 'd'], [3600, 'h'], [60, 'min']]) {
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}

let aheadMs = 0; // of the gateway's clock

export function setNow(text) {
  const now = Date.parse(text);
  if (Number.isFinite(now)) aheadMs = now - Date.now();
}

export const nowMs = () => Date.now() + aheadMs;

/** A time (RFC 3339, or Unix milliseconds) relative to the gateway's clock: {text, title}. */
export function moment(time) {
  const ms = typeof time === 'number' ? time : Date.parse(time ?? '');
  if (!Number.isFinite(ms) || Math.abs(ms) > 8.64e15) return {text: '', title: ''};
  const seconds = (nowMs() - ms) / 1000, exact = new Date(ms);
  const text = Math.abs(seconds) < 1 ? 'now' : seconds > 0 ? `${duration(seconds)} ago` : `in ${duration(-seconds)}`;
  return {text, title: `${exact.toISOString()} (here: ${exact.toLocaleString()})`};
}

// State is told by a sign and a word; its colour only repeats that

const STATES = {ready: ['good', '✓'], degraded: ['fair', '!'], 'not ready': ['bad', '✕']};

export const kindOf = state => (STATES[state] ?? ['fair', '?'])[0];
export const signOf = state => (STATES[state] ?? ['fair', '?'])[1];

// Tables: rows are kept by their key, and only what has changed is written. Narrow: each row is a card (page.css)

export class Table {
  /** columns: {name, of: row => text or {text, title, kind, detail}, number, place: a class, build: row => element, made once}. */
  constructor(host, label, columns, key) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    const head = make('tr', {role: 'row'});
    for (const column of columns) {
      const cell = make('th', {role: 'columnheader', scope: 'col', className: column.number ? 'number' : ''});
      cell.append(column.hidesName ? make('span', {className: 'unseen'}, column.name) : column.name);
      head.append(cell);
    }
    this.body = make('tbody', {role: 'rowgroup'});
    this.element = make('table', {role: 'table', 'aria-label': label},
      make('thead', {role: 'rowgroup'}, head), this.body);
    host.replaceChildren(this.element);
  }

  update(rows) {
    setHidden(this.element, rows.length === 0);
    const gone = new Set(this.rows.keys());
    let place = this.body.firstChild;
    for (const row of rows) {
      const key = this.key(row);
      let shown = this.rows.get(key);
      if (shown === undefined) this.rows.set(key, shown = this.#make(row));
      else if (!gone.delete(key)) continue; // the same key twice
      this.#fill(shown, row);
      if (shown.element === place) place = place.nextSibling;
      else this.body.insertBefore(shown.element, place);
    }
    for (const key of gone) {
      this.rows.get(key).element.remove();
      this.rows.delete(key);
    }
  }

  #make(row) {
    const element = make('tr', {role: 'row'});
    const cells = this.columns.map(column => {
      const cell = make('td', {role: 'cell', className: column.number ? 'number' : column.place ?? '', 'data-label': column.name});
      if (column.build) cell.append(column.build(row));
      element.append(cell);
      return {cell, value: null, detail: null, main: null};
    });
    return {element, cells};
  }

  #fill(shown, row) {
    this.columns.forEach((column, index) => {
      if (!column.of) return;
      const told = column.of(row), value = typeof told === 'string' ? {text: told} : told, at = shown.cells[index];
      const same = JSON.stringify(value);
      if (at.value === same) return;
      at.value = same;
      at.main ??= at.cell.appendChild(make('span'));
      setText(at.main, value.text);
      at.main.title = value.title ?? '';
      at.main.className = value.kind ?? '';
      if (value.detail || at.detail) {
        at.detail ??= at.cell.appendChild(make('div', {className: 'detail'}));
        setText(at.detail, value.detail ?? '');
      }
      at.cell.classList.toggle('empty', !value.text && !value.detail);
      at.cell.classList.toggle('nothing', value.kind === 'quiet');
    });
  }
}

/** Asks in a dialog; resolves with whether it was confirmed. Escape cancels. */
export function confirmed(title, text, action) {
  const dialog = byId('confirm');
  setText(byId('confirm-title'), title);
  setText(byId('confirm-text'), text);
  setText(byId('confirm-do'), action);
  dialog.returnValue = '';
  return new Promise(resolve => {
    dialog.addEventListener('close', () => resolve(dialog.returnValue === 'do'), {once: true});
    dialog.showModal();
  });
}

/** Runs `work` unless its button is at work already, and says in `said` what has failed. The button keeps the focus. */
export async function during(button, said, work) {
  if (button.ariaBusy === 'true') return;
  button.ariaBusy = 'true';
  try {
    await work();
  } catch (error) {
    said.classList.add('wrong');
    setText(said, error.message);
  } finally {
    button.ariaBusy = null;
  }
}

export function say(said, text) {
  said.classList.remove('wrong');
  setText(said, text);
}
