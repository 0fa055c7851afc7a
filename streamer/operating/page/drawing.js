// The networks as boxes, and what flows between them as arcs: forward on one side, back on the other.
//
// Wide: boxes in a row, arcs above to the right and below to the left. Narrow, or many: boxes in a column, arcs right of
// it downwards and left of it upwards. What does not flow is told by dashes and a sign, not by colour alone.

import {count, kindOf, rate, signOf} from '/page/dom.js';

const SVG = 'http://www.w3.org/2000/svg';
const BOXES_MAX = 8;
const BOX = {wide: 168, narrow: 150, high: 92, radius: 10};
const ROW_GAP = 80, COLUMN_GAP = 44;
const BULGE = 40, BULGE_EACH = 34, BULGE_MIN = 24;
const NAME_MAX = 15; // characters that fit
const LABEL = {high: 16, character: 7.4}; // pixels, at most
const ALONG = [0.5, 0.36, 0.64, 0.24, 0.76]; // of an arc: where its label may stand, best first

let drawn = '';

function shape(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const text = (x, y, what, kind, anchor = 'middle') => shape('text', {x, y, class: kind, 'text-anchor': anchor}, what);
const cut = name => (name.length > NAME_MAX ? `${name.slice(0, NAME_MAX - 1)}…` : name);

/** Those that a person should see first if there are too many: what is wrong, then what is busy. */
function important(endpoints) {
  const weight = one => ({bad: 4e12, fair: 2e12, good: 0}[kindOf(one.state)]) + (one.held_count || one.paused ? 1e12 : 0) + (one.in_per_s ?? 0) + (one.out_per_s ?? 0);
  const chosen = new Set([...endpoints].sort((a, b) => weight(b) - weight(a)).slice(0, BOXES_MAX));
  return endpoints.filter(one => chosen.has(one));
}

/** Draws into `host`, if anything has changed. Returns a caption. */
export function draw(host, endpoints, flows, paused) {
  const shown = endpoints.length > BOXES_MAX ? important(endpoints) : endpoints;
  const places = new Map(shown.map((one, index) => [one.name, index]));
  const arcs = flows.filter(one => places.has(one.from) && places.has(one.to)).map(one => {
    const source = shown[places.get(one.from)], target = shown[places.get(one.to)], [kind, label] = arcOf(one, source, target, paused);
    return {...one, kind, label};
  });
  const width = Math.max(host.clientWidth, 280);
  const part = endpoints.length > shown.length ? `${shown.length} of ${count(endpoints.length)} networks, those that are wrong or busy: the table has all. ` : '';
  const caption = shown.length ? `${part}Arcs: what the rules let pass, in messages per second. ‖ some of it is held or paused; ✕ the network is not ready.` : '';
  const key = JSON.stringify([width, shown.map(boxLines), arcs.map(one => [one.from, one.to, one.kind, one.label])]);
  if (key === drawn) return caption;
  drawn = key;
  host.replaceChildren(...(shown.length ? [picture(width, shown, arcs, places)] : []));
  return caption;
}

function boxLines(one) {
  const last = one.paused ? '❚❚ paused' : one.held_count ? `❚❚ ${count(one.held_count)} held` : one.waiting ? `${count(one.waiting)} waiting` : '';
  return [one.name, one.transport, one.state, `in ${rate(one.in_per_s)}  out ${rate(one.out_per_s)}`, last];
}

/** How an arc looks: its kind and its label. */
function arcOf(flow, source, target, paused) {
  if (target.state === 'not ready') return ['stopped', `✕ ${rate(flow.per_s)}`];
  if (isHeld(source, target, paused)) return ['held', `‖ ${rate(flow.per_s)}`];
  return flow.per_s ? ['flowing', rate(flow.per_s)] : ['idle', '0/s'];
}

/** Whether something of `source` is held for `target`, or paused toward it, as far as it is known. */
function isHeld(source, target, paused) {
  const held = target.held ?? [], lives = (one, authority) => (one.authorities ?? []).some(pattern => fits(pattern, authority));
  const addresses = [
    ...held.map(one => one.address),
    ...paused.filter(one => (one.peer === target.name || lives(target, one.peer)) && (!one.from || one.from === source.name)).map(one => one.topic),
  ];
  const authorities = addresses.map(one => /\/\/([^/]+)/.exec(one)?.[1] ?? '*');
  return (target.held_count ?? 0) > held.length || authorities.some(one => one === '*' || lives(source, one));
}

const fits = (pattern, authority) => pattern === '*' || pattern === authority || (pattern.startsWith('*.') && authority.endsWith(pattern.slice(1)));

function picture(width, shown, flows, places) {
  const rowWidth = shown.length * BOX.wide + (shown.length - 1) * ROW_GAP;
  const across = rowWidth + 2 <= width;
  const furthest = flows.reduce((most, one) => Math.max(most, Math.abs(places.get(one.to) - places.get(one.from))), 1);
  const layout = across ? row(shown, flows, places, furthest, rowWidth) : column(shown, width, furthest);
  const said = flows.map(one => `${one.from} to ${one.to}: ${one.label}`).join('; ');
  const svg = shape('svg', {
    width: layout.width, height: layout.height, viewBox: `0 0 ${layout.width} ${layout.height}`, role: 'img',
    'aria-label': `${shown.map(one => `${one.name} ${one.state}`).join(', ')}. ${said || 'Nothing may flow between them.'}`,
  });
  svg.append(shape('defs', {}, ...['flowing', 'idle', 'held', 'stopped'].map(head)));
  const labels = [], taken = [];
  for (const flow of flows) {
    const {kind, label} = flow, arc = layout.arc(places.get(flow.from), places.get(flow.to));
    const thick = kind === 'idle' ? 1.25 : 1.5 + Math.min(Math.log10(1 + (flow.per_s ?? 0)), 4) / 2;
    const path = shape('path', {d: arc.path, class: `arc ${kind}`, 'stroke-width': thick, 'marker-end': `url(#head-${kind})`});
    path.append(shape('title', {}, `${flow.from} to ${flow.to}: ${rate(flow.per_s)}, ${count(flow.forwarded ?? 0)} forwarded`));
    svg.append(path);
    const at = free(arc.points, label.length * LABEL.character, taken);
    labels.push(text(at.x, at.y + 4, label, `rate ${kind}`));
  }
  shown.forEach((one, index) => svg.append(box(one, layout.wide, ...layout.place(index))));
  svg.append(...labels);
  return svg;
}

/** Returns where on a curve a label stands clear of the others. */
function free([a, b, c, d], wide, taken) {
  const clear = at => taken.every(one => Math.abs(one.x - at.x) > (one.wide + wide) / 2 || Math.abs(one.y - at.y) > LABEL.high);
  const along = t => {
    const u = 1 - t, on = axis => u * u * u * a[axis] + 3 * u * u * t * b[axis] + 3 * u * t * t * c[axis] + t * t * t * d[axis];
    return {x: on(0), y: on(1), wide};
  };
  const places = ALONG.map(along), found = places.find(clear) ?? places[0];
  taken.push(found);
  return found;
}

const curve = (...points) => ({points, path: `M${points[0].join(' ')} C${points.slice(1).map(one => one.join(' ')).join(' ')}`});

const head = kind => shape('marker', {
  id: `head-${kind}`, class: `head ${kind}`, viewBox: '0 0 8 8', refX: 7, refY: 4, orient: 'auto',
  markerWidth: 11, markerHeight: 11, markerUnits: 'userSpaceOnUse',
}, shape('path', {d: 'M0 0 L8 4 L0 8 Z'}));

function row(shown, flows, places, furthest, width) {
  const rise = distance => BULGE + (distance - 1) * BULGE_EACH;
  const reach = isThis => flows.filter(one => isThis(places.get(one.from), places.get(one.to)))
    .reduce((most, one) => Math.max(most, rise(Math.abs(places.get(one.to) - places.get(one.from)))), 0);
  const above = reach((from, to) => from < to), below = reach((from, to) => from > to);
  const top = above ? above + 16 : 4, left = index => 1 + index * (BOX.wide + ROW_GAP);
  return {
    width: width + 2,
    wide: BOX.wide,
    height: top + BOX.high + (below ? below + 16 : 4),
    place: index => [left(index), top],
    arc(from, to) {
      const up = to > from, sign = up ? -1 : 1, y = up ? top - 1 : top + BOX.high + 1;
      const inset = BOX.wide * 0.28, middle = index => left(index) + BOX.wide / 2;
      const x1 = middle(from) + (up ? inset : -inset), x2 = middle(to) - (up ? inset : -inset);
      const bulge = rise(Math.abs(to - from)), control = y + (sign * bulge * 4) / 3;
      return curve([x1, y], [x1, control], [x2, control], [x2, y + sign * 2]);
    },
  };
}

function column(shown, width, furthest) {
  const wide = Math.min(width < 500 ? BOX.narrow : BOX.wide, width);
  const side = Math.min((width - wide) / 2, BULGE + furthest * BULGE_EACH + 40), most = Math.max(side - 24, BULGE_MIN);
  const each = furthest > 1 ? Math.min((most - BULGE_MIN - 8) / (furthest - 1), BULGE_EACH) : 0;
  const left = Math.max(side, 0);
  const top = index => 1 + index * (BOX.high + COLUMN_GAP);
  return {
    width: 2 * left + wide,
    wide,
    height: shown.length * (BOX.high + COLUMN_GAP) - COLUMN_GAP + 2,
    place: index => [left, top(index)],
    arc(from, to) {
      const down = to > from, sign = down ? 1 : -1, x = down ? left + wide + 1 : left - 1;
      const inset = BOX.high * 0.28, middle = index => top(index) + BOX.high / 2;
      const y1 = middle(from) + (down ? inset : -inset), y2 = middle(to) - (down ? inset : -inset);
      const bulge = BULGE_MIN + 8 + each * (Math.abs(to - from) - 1), control = x + (sign * bulge * 4) / 3;
      return curve([x, y1], [control, y1], [control, y2], [x + sign * 2, y2]);
    },
  };
}

function box(one, wide, x, y) {
  const [name, transport, state, rates, last] = boxLines(one), middle = x + wide / 2, kind = kindOf(one.state);
  const group = shape('g', {class: `box ${kind}`});
  group.append(
    shape('title', {}, `${name} (${transport}): ${state}${one.reason ? `, ${one.reason}` : ''}`),
    shape('rect', {x, y, width: wide, height: BOX.high, rx: BOX.radius}),
    text(middle, y + 22, cut(name), 'name'),
    text(middle, y + 41, `${signOf(state)} ${state}`, `state ${kind}`),
    text(middle, y + 60, rates, 'rates'),
    text(middle, y + 79, last || transport, last ? 'last' : 'quiet'),
  );
  return group;
}
