// The first screen: the state of the whole, the networks, and what each of them does.

import * as api from '/page/api.js';
import {byId, bytes, confirmed, count, duration, kindOf, make, moment, rate, say, setHidden, setText, signOf, Table} from '/page/dom.js';
import {draw} from '/page/drawing.js';

const FILTER_FROM = 12; // endpoints; fewer are seen at once
const EVERYTHING = 'up://*/FFFFFFFF/FF/FFFF'; // the pattern that all topics match
const NAMES_MAX = 500; // that are suggested
const LINES_MAX = 300; // of problems, flows, ...

let last = null;
let names = '';

const states = one => `${signOf(one.state)} ${one.state}`;
const times = (since, word = '') => { const at = moment(since); return {text: at.text && word + at.text, title: at.title}; };

function held(one) {
  if (!one.held_count) return '';
  const lines = (one.held ?? []).map(each => `${each.address}: ${each.reason}, ${count(each.records)} waiting${each.text ? ` – ${each.text}` : ''}`);
  const more = one.held_count - lines.length;
  return {text: `❚❚ ${count(one.held_count)}`, kind: 'fair', title: lines.join('\n'), detail: lines.slice(0, 3).join('\n') + (lines.length > 3 || more > 0 ? `\nand ${count(more + Math.max(lines.length - 3, 0))} more` : '')};
}

function dropped(one) {
  const reasons = Object.entries(one.dropped ?? {}).filter(([, number]) => number);
  const total = reasons.reduce((sum, [, number]) => sum + number, 0);
  return total ? {text: count(total), title: reasons.map(([reason, number]) => `${reason}: ${count(number)}`).join('\n')} : '';
}

const COLUMNS = [
  {name: 'Endpoint', of: one => ({text: one.name, kind: 'name', title: (one.authorities ?? []).join(', '), detail: `${one.transport}: ${(one.authorities ?? []).join(', ')}`})},
  {name: 'State', place: 'state-cell', of: one => {
    const since = moment(one.since);
    const marks = `${one.connected === false && one.state !== 'not ready' ? ', not connected' : ''}${one.paused ? ', ❚❚ paused' : ''}`;
    return {text: states(one) + marks, kind: kindOf(one.state), title: since.title, detail: `since ${since.text.replace(/ ago$/, '')}${one.reason ? `: ${one.reason}` : ''}`};
  }},
  {name: 'In', number: true, of: one => ({text: rate(one.in_per_s), detail: `${count(one.received)} total`})},
  {name: 'Out', number: true, of: one => ({text: rate(one.out_per_s), detail: `${count(one.forwarded)} total`})},
  {name: 'Waiting', number: true, of: one => ({text: count(one.waiting ?? 0), kind: one.waiting ? 'strong' : 'quiet'})},
  {name: 'Lag', number: true, of: one => one.lag_records ? {text: duration(one.lag_s), detail: `${count(one.lag_records)} records`} : {text: '0 s', kind: 'quiet'}},
  {name: 'Retries', number: true, of: one => ({text: count(one.retries ?? 0), kind: one.retries ? '' : 'quiet'})},
  {name: 'Held', of: held},
  {name: 'Last in', place: 'time', of: one => times(one.last_in)},
  {name: 'Last out', place: 'time', of: one => times(one.last_out)},
  {name: 'Dropped', number: true, of: dropped},
  {name: 'Lost', number: true, of: one => one.lost ? {text: count(one.lost), kind: 'bad', title: 'dropped although their network was told that they were taken, and not acknowledged by a person'} : ''},
];

const endpoints = new Table(byId('endpoints'), 'Endpoints', COLUMNS, one => one.name);
const flows = new Table(byId('flows'), 'Flows', [
  {name: 'From', of: one => one.from},
  {name: 'To', of: one => one.to},
  {name: 'Rate', number: true, of: one => rate(one.per_s)},
  {name: 'Forwarded', number: true, of: one => count(one.forwarded)},
], one => `${one.from}\n${one.to}`);

export function opened() {
  if (last) tell(last);
}

export function tellNames(status) {
  const found = (status.endpoints ?? []).slice(0, NAMES_MAX).map(one => one.name);
  if (found.join('\n') === names) return;
  names = found.join('\n');
  byId('endpoint-names').replaceChildren(...found.map(name => make('option', {value: name})));
}

export function tell(status) {
  last = status;
  const all = status.endpoints ?? [], allowed = (status.flows ?? []).filter(one => one.allowed !== false && one.from !== one.to);
  tellProblems(status);
  setText(byId('drawing-says'), draw(byId('drawing'), all, allowed, status.paused ?? []));
  if (byId('flows-details').open) flows.update(allowed.slice(0, LINES_MAX));
  tellEndpoints(all);
  tellFacts(status);
  const core = status.core ? `, ${status.core} core` : '';
  setText(byId('about'), `Version ${status.version ?? '?'}${core}, process ${status.pid ?? '?'}, started ${moment(status.started).text || '?'}. Configuration ${status.config ?? 'not from a file'}, data in ${status.data_dir ?? '?'}.`);
}

function tellEndpoints(all) {
  setHidden(byId('endpoint-filter-label'), all.length < FILTER_FROM);
  const part = byId('endpoint-filter').value.trim().toLowerCase();
  const fits = one => `${one.name} ${one.state} ${one.transport} ${(one.authorities ?? []).join(' ')}`.toLowerCase().includes(part);
  endpoints.update(part ? all.filter(fits) : all);
}

byId('endpoint-filter').addEventListener('input', () => last && tellEndpoints(last.endpoints ?? []));
byId('endpoint-filter').addEventListener('keydown', event => {
  if (event.key === 'Escape') { event.target.value = ''; if (last) tellEndpoints(last.endpoints ?? []); }
});
byId('flows-details').addEventListener('toggle', () => last && tell(last));
addEventListener('resize', () => last && !byId('status-screen').hidden && tell(last));

// Problems and notes

let problemsShown = '';

function tellProblems(status) {
  const problems = status.problems ?? [], notes = status.notes ?? [];
  const reason = status.reason && !problems.length ? [status.reason] : []; // otherwise the problems have it
  const key = JSON.stringify([reason, problems, notes]);
  if (key === problemsShown) return;
  problemsShown = key;
  const wasOpen = byId('notes')?.open ?? false;
  const wrong = [...reason, ...problems];
  byId('problems').replaceChildren(
    ...(wrong.length ? [make('section', {className: `panel problems ${kindOf(status.state)}`, 'aria-label': 'Problems'},
      make('h2', {}, wrong.length === 1 ? 'A problem' : `${wrong.length} problems`), list(wrong))] : []),
    ...(notes.length ? [make('details', {id: 'notes', open: wasOpen}, make('summary', {}, notes.length === 1 ? 'A note' : `${notes.length} notes`), list(notes))] : []),
  );
}

const list = lines => make('ul', {}, ...lines.slice(0, LINES_MAX).map(line => make('li', {}, line)));

// Below: everything else, as short lists

let factsShown = '';

function tellFacts(status) {
  const facts = [
    ['Dead letters', lettersFacts(status.dead_letters)],
    ['Disk', diskFacts(status.disk)],
    ...(status.logs ?? []).map(one => [`The ${one.name} log`, logFacts(one)]),
    ['Histories that are followed', (status.follows ?? []).map(one => [one.service, `${one.endpoint}: ${(one.state ?? '').replaceAll('_', ' ')}${one.trouble ? `, ${one.trouble}` : ''}`, '', one.trouble ? 'fair' : ''])],
    ['Epochs', (status.epochs ?? []).map(one => [one.group, `${count(one.open)} open, ${count(one.ended)} ended${one.incomplete ? `, ${count(one.incomplete)} incomplete` : ''}`])],
    ['Certificates', (status.certificates ?? []).map(one => {
      const expires = moment(one.expires), soon = Date.parse(one.expires) - Date.now() < 14 * 86400e3;
      return [`${one.endpoint || 'admin port'} ${one.setting}`, `${soon ? '! ' : ''}expires ${expires.text}`, expires.title, soon ? 'fair' : ''];
    })],
  ].filter(([, lines]) => lines.length);
  const paused = status.paused ?? [];
  const key = JSON.stringify([facts, paused]);
  if (key === factsShown) return;
  factsShown = key;
  const focused = document.activeElement?.dataset?.pause;
  byId('facts').replaceChildren(
    ...(paused.length ? [pausedPanel(paused)] : []),
    ...facts.map(([title, lines]) => make('section', {className: 'panel'}, make('h2', {}, title), make('dl', {}, ...lines.slice(0, LINES_MAX).flatMap(
      ([name, value, exact, kind]) => [make('dt', {}, name), make('dd', {title: exact ?? '', className: kind ?? ''}, value)])))),
  );
  if (focused) [...byId('facts').querySelectorAll('button')].find(one => one.dataset.pause === focused)?.focus();
}

function lettersFacts(letters) {
  if (!letters) return [];
  const codes = Object.entries(letters.by_code ?? {}).filter(([, number]) => number);
  return [['stored', count(letters.stored ?? 0), '', letters.stored ? 'strong' : ''], ['since the start', count(letters.total ?? 0)], ...codes.map(([code, number]) => [code, count(number)])];
}

function diskFacts(disk) {
  return disk ? [['free', bytes(disk.free_bytes)], ['reserve', bytes(disk.reserve_bytes)], ['limit of the log', bytes(disk.log_limit_bytes)]].filter(([, text]) => text) : [];
}

const percent = share => (share > 0 && share < 0.01 ? '<1 %' : `${Math.round(100 * share)} %`);

function logFacts(log) {
  const oldest = moment(log.oldest), share = log.limit_bytes ? ` (${percent((log.bytes ?? 0) / log.limit_bytes)})` : '';
  return [
    ['records', log.newest_seq ? `${count(log.oldest_seq)} to ${count(log.newest_seq)}` : 'none'],
    ['size', `${bytes(log.bytes)} of ${bytes(log.limit_bytes)}${share}`],
    ...(oldest.text ? [['oldest', oldest.text, oldest.title]] : []),
  ];
}

// Paused topics, also on the third screen

const pauseText = one => `${one.topic === EVERYTHING ? 'everything' : one.topic}${one.from ? ` from ${one.from}` : ''} toward ${one.peer}`;

export function pausedPanel(paused) {
  const said = make('p', {className: 'said', role: 'status'});
  const lines = paused.slice(0, LINES_MAX).map(one => {
    const button = make('button', {type: 'button', 'aria-label': `Resume ${pauseText(one)}`}, 'Resume …');
    button.dataset.pause = pauseText(one);
    button.addEventListener('click', () => resume(one, said));
    return make('li', {}, make('span', {}, `❚❚ ${pauseText(one)} `), button);
  });
  return make('section', {className: 'panel paused', 'aria-label': 'Paused'}, make('h2', {}, 'Paused'), make('ul', {className: 'bare'}, ...lines), said);
}

async function resume(one, said) {
  if (!await confirmed('Resume?', `What waits is sent: ${pauseText(one)}.`, 'Resume')) return;
  try {
    await api.operate('resume', one.from ? {rule_from: one.from, rule_to: one.peer} : {topic: one.topic, peer: one.peer});
    say(said, 'Resumed.');
  } catch (error) {
    said.classList.add('wrong');
    setText(said, error.message);
  }
}
