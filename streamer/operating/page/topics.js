// The third screen: who has subscribed to what, the last messages of a topic, and topics that are paused.

import * as api from '/page/api.js';
import {byId, confirmed, count, during, make, moment, say, setHidden, Table} from '/page/dom.js';
import {pausedPanel} from '/page/status.js';

const PAGE = 200;

let rows = [];
let next = null;
let shownFilter = {};
let shownTopic = '';
let pausedShown = '';

const button = form => byId(form).querySelector('button');

// Subscriptions

const table = new Table(byId('subscriptions'), 'Subscriptions', [
  {name: 'Topic', build: row => {
    const open = make('button', {type: 'button', className: 'link uri', title: 'show its last messages'}, row.topic);
    open.addEventListener('click', () => {
      byId('messages-topic').value = row.topic;
      showMessages();
      byId('messages-title').scrollIntoView({block: 'nearest'});
    });
    return open;
  }},
  {name: 'Subscriber', of: row => ({text: row.subscriber, kind: 'uri'})},
  {name: 'At', of: row => ({text: row.usubscription, title: 'the uSubscription that says so'})},
  {name: 'Every', of: row => row.sample_period_ms ? `${count(row.sample_period_ms)} ms` : {text: 'message', kind: 'quiet'}},
], row => `${row.usubscription}\n${row.topic}\n${row.subscriber}`);

async function load(pressed, more) {
  await during(pressed, byId('subscriptions-said'), async () => {
    const topic = byId('subscriptions-topic').value.trim(), subscriber = byId('subscriptions-subscriber').value.trim();
    const given = more ? shownFilter : {...(topic && {topic}), ...(subscriber && {subscriber})};
    const answer = await api.operate('subscriptions', {...given, limit: PAGE, ...(more && {after: next})});
    shownFilter = given;
    rows = more ? [...rows, ...answer.subscriptions] : answer.subscriptions;
    next = answer.next;
    table.update(rows);
    setHidden(byId('subscriptions-more'), next === null);
    const stale = answer.services.filter(one => !one.healthy).map(one => one.name);
    const silent = stale.length ? ` No answer now from ${stale.join(', ')}: what is shown of it is older.` : '';
    say(byId('subscriptions-said'), `${count(rows.length)} of ${count(answer.total)} shown${next !== null && rows.length < PAGE ? ', and more to search' : ''}.${silent}`);
  });
}

byId('subscriptions-form').addEventListener('submit', event => { event.preventDefault(); load(button('subscriptions-form'), false); });
byId('subscriptions-more').addEventListener('click', event => load(event.target, true));

// Messages

function payload(row) {
  if (!('payload' in row)) return make('span', {className: 'quiet'}, 'no payload');
  let text = row.payload, format = row.payload_as;
  if (format === 'decoded') text = JSON.stringify(text, null, 1);
  if (format === 'json') {
    try { text = JSON.stringify(JSON.parse(text), null, 1); } catch { /* shown as it is */ }
  }
  if (format === 'hex') text = text.replace(/(..)(?=.)/g, '$1 ');
  const shownBytes = format === 'hex' ? row.payload.length / 2 : null;
  const cut = row.payload_bytes > 4096 && format !== 'decoded' ? `, the first ${count(shownBytes ?? 4096)} are shown` : '';
  return make('div', {}, make('pre', {tabIndex: text.length > 400 ? 0 : -1}, String(text)),
    make('div', {className: 'detail'}, `${row.payload_format}, ${count(row.payload_bytes)} bytes${cut}`));
}

const messages = new Table(byId('messages'), 'Last messages', [
  {name: 'Stored', place: 'time', of: row => moment(row.stored_ms)},
  {name: 'Message', place: 'about', of: row => ({text: row.type, kind: 'strong', title: `created ${moment(row.time_ms).title}`, detail: [row.id, row.sink && `→ ${row.sink}`, row.priority, row.ttl_ms && `ttl ${count(row.ttl_ms)} ms`, `${row.log} log, ${count(row.seq)}`].filter(Boolean).join('\n')})},
  {name: 'Payload', build: payload},
], row => `${row.log} ${row.seq}`);

function showMessages() {
  return during(button('messages-form'), byId('messages-said'), async () => {
    const topic = byId('messages-topic').value.trim();
    if (topic !== shownTopic) messages.update([]);
    const answer = await api.operate('messages', {topic, limit: Number(byId('messages-limit').value)});
    shownTopic = topic;
    messages.update(answer.messages);
    say(byId('messages-said'), answer.messages.length ? `The last ${count(answer.messages.length)} in the log, newest first.` : 'The log has no message of this topic.');
  });
}

byId('messages-form').addEventListener('submit', event => { event.preventDefault(); showMessages(); });

// Pauses

byId('pause-form').addEventListener('submit', event => {
  event.preventDefault();
  const [topic, from, peer] = ['topic', 'from', 'peer'].map(one => byId(`pause-${one}`).value.trim());
  during(button('pause-form'), byId('pause-said'), async () => {
    if (from && topic) throw new Error('A rule is paused as a whole: leave the topic or “From” empty.');
    const given = from ? {rule_from: from, rule_to: peer} : topic ? {topic, peer} : {endpoint: peer};
    if (!await confirmed('Pause?', `${topic || 'Everything'}${from ? ` from ${from}` : ''} waits in the log, and does not go to ${peer} until it is resumed.`, 'Pause')) return;
    await api.operate('pause', given);
    say(byId('pause-said'), 'Paused.');
  });
});

export function tell(status) {
  const paused = status.paused ?? [], key = JSON.stringify(paused);
  if (key === pausedShown) return;
  pausedShown = key;
  byId('topics-paused').replaceChildren(...(paused.length ? [pausedPanel(paused)] : []));
}

export const opened = () => load(button('subscriptions-form'), false);
