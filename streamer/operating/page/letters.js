// The second screen: dead letters, which can be sent again or deleted. What that would do is counted first.

import * as api from '/page/api.js';
import {byId, bytes, confirmed, count, during, make, moment, say, setHidden, setText, Table} from '/page/dom.js';

const PAGE = 100;
const NUMBERS_MAX = 1000; // in one request
const WHYS_MAX = 3; // reasons that are shown of those that were not sent

let letters = []; // newest first
let next = null;
let shownFilter = {};
const selected = new Set();

const table = new Table(byId('letters'), 'Dead letters', [
  {name: 'Select', hidesName: true, build: row => {
    const box = make('input', {type: 'checkbox', checked: selected.has(row.number), 'aria-label': `Select letter ${row.number}`});
    box.addEventListener('change', () => {
      if (box.checked) selected.add(row.number);
      else selected.delete(row.number);
      tellActions();
    });
    return box;
  }},
  {name: 'Number', number: true, of: row => String(row.number)},
  {name: 'When', place: 'time', of: row => moment(row.time_ms)},
  {name: 'Code', of: row => ({text: row.code, kind: 'strong'})},
  {name: 'Endpoint', of: row => row.endpoint || '–'},
  {name: 'Why', of: row => row.reason ?? ''},
  {name: 'Message', of: row => ({text: `${row.source ?? ''}${row.sink ? ` → ${row.sink}` : ''}`, kind: 'uri', title: `id ${row.id ?? ''}`, detail: typeof row.payload_bytes === 'number' ? `${bytes(row.payload_bytes)} of payload` : ''})},
], row => row.number);

function filter() {
  const found = {}, code = byId('letters-code').value.trim(), endpoint = byId('letters-endpoint').value.trim();
  const since = Date.parse(byId('letters-since').value);
  if (code) found.code = code.toUpperCase().replaceAll(' ', '_');
  if (endpoint) found.endpoint = endpoint;
  if (Number.isFinite(since)) found.since_ms = since;
  return found;
}

export const opened = () => load(byId('letters-form').querySelector('button'));

async function load(button, before) {
  await during(button, byId('letters-said'), async () => {
    const given = before === undefined ? filter() : shownFilter;
    const answer = await api.operate('dead_letters', {...given, limit: PAGE, ...(before === undefined ? {} : {before})});
    const found = answer.dead_letters;
    next = answer.next;
    shownFilter = given;
    if (before === undefined) selected.clear();
    letters = before === undefined ? found : [...letters, ...found];
    letters.sort((a, b) => b.number - a.number);
    table.update([]);
    table.update(letters);
    setHidden(byId('letters-more'), next === null);
    const all = Object.keys(given).length === 0;
    say(byId('letters-said'), letters.length ? `${count(letters.length)} ${letters.length === 1 ? 'letter is' : 'letters are'} shown, ${count(answer.stored)} stored.` : all ? 'There are no dead letters.' : 'No dead letter fits this filter.');
    tellActions();
  });
  if (byId('letters-said').classList.contains('wrong') && before === undefined) {
    letters = [];
    selected.clear();
    table.update([]);
    setHidden(byId('letters-more'), true);
    tellActions();
  }
}

function tellActions() {
  setHidden(byId('letters-actions'), letters.length === 0);
  byId('letters-all').checked = letters.length > 0 && selected.size === letters.length;
  byId('letters-all').indeterminate = selected.size > 0 && selected.size < letters.length;
  const what = selected.size ? `${count(selected.size)} selected` : Object.keys(shownFilter).length ? 'all that fit' : 'all';
  for (const [id, word] of [['letters-resend', 'Resend'], ['letters-purge', 'Purge']]) {
    setText(byId(id), `${word} ${what} …`);
  }
}

byId('letters-form').addEventListener('submit', event => { event.preventDefault(); load(event.submitter ?? event.target.querySelector('button')); });
byId('letters-more').addEventListener('click', event => load(event.target, next));
byId('letters-all').addEventListener('change', event => {
  selected.clear();
  if (event.target.checked) for (const one of letters) selected.add(one.number);
  for (const box of byId('letters').querySelectorAll('input[type=checkbox]')) box.checked = event.target.checked;
  tellActions();
});

/** The requests of an operation on what is selected, or else on all that fit the filter, or else on all. */
function chosen() {
  const numbers = [...selected].sort((a, b) => a - b), parts = [];
  for (let first = 0; first < numbers.length; first += NUMBERS_MAX) parts.push({numbers: numbers.slice(first, first + NUMBERS_MAX)});
  return parts.length ? parts : [Object.keys(shownFilter).length ? shownFilter : {all: true}];
}

// Both return how many letters have met which end: {counts: {name: number}, whys: Set of reasons}

async function resend(dryRun) {
  const counts = {}, whys = new Set();
  for (const part of chosen()) {
    let given = {...part, dry_run: dryRun}, answer = null;
    do {
      answer = await api.operate('resend_letters', given);
      for (const [name, number] of Object.entries(answer.counts)) counts[name] = (counts[name] ?? 0) + number;
      for (const one of answer.letters) if (one.reason && whys.size < WHYS_MAX) whys.add(one.reason);
      given = {...given, after: answer.next, until: answer.until};
    } while (answer.next !== null);
  }
  return {counts, whys};
}

async function purge(dryRun) {
  const counts = {purged: 0};
  for (const part of chosen()) {
    const answer = await api.operate('purge_letters', {...part, dry_run: dryRun});
    counts.purged += dryRun ? answer.would_purge : answer.purged;
  }
  return {counts, whys: new Set()};
}

function told({counts, whys}) {
  const parts = Object.entries(counts).map(([name, number]) => `${count(number)} ${name}`);
  return `${parts.join(', ') || 'none'}${whys.size ? ` (${[...whys].join('; ')})` : ''}`;
}

function act(button, work, word, warning) {
  return during(button, byId('letters-said'), async () => {
    const which = selected.size ? `the ${count(selected.size)} selected` : Object.keys(shownFilter).length ? 'all that fit the filter' : 'all';
    const trial = told(await work(true));
    if (!await confirmed(`${word} dead letters?`, `This is for ${which}. A trial says: ${trial}.${warning}`, word)) return;
    const done = told(await work(false));
    await load(byId('letters-form').querySelector('button'));
    say(byId('letters-said'), `${word}: ${done}.`);
  });
}

byId('letters-resend').addEventListener('click', event => act(event.target, resend, 'Resend', ''));
byId('letters-purge').addEventListener('click', event => act(event.target, purge, 'Purge', ' What is purged can’t be brought back.'));
tellActions();
