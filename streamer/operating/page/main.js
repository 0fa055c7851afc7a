// Which screen is shown, the token, and the status, which is asked for while somebody can see it.

import * as api from '/page/api.js';
import {byId, duration, kindOf, moment, setHidden, setNow, setText, signOf} from '/page/dom.js';
import * as letters from '/page/letters.js';
import * as statusScreen from '/page/status.js';
import * as topics from '/page/topics.js';

const EVERY_MS = 2000;
const SCREENS = {status: statusScreen, letters, topics};

let asksForToken = false;
let shown = '';
let timer = 0;
let asking = null;
let answeredAt = 0; // Date.now() of the last answer

// Screens

function wanted() {
  const name = location.hash.slice(1);
  return name in SCREENS ? name : 'status';
}

function show() {
  const name = wanted();
  for (const each of Object.keys(SCREENS)) {
    setHidden(byId(`${each}-screen`), asksForToken || each !== name);
    const link = document.querySelector(`nav a[href="#${each}"]`);
    if (each === name) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  setHidden(byId('token-screen'), !asksForToken);
  setHidden(byId('forget'), !api.hasToken() || asksForToken);
  document.title = name === 'status' ? 'up-streamer' : `${{letters: 'Dead letters', topics: 'Topics'}[name]} – up-streamer`;
  if (asksForToken) {
    shown = '';
  } else if (shown !== name) {
    shown = name;
    SCREENS[name].opened();
  }
}

// The token

function askForToken(why) {
  setText(byId('token-why'), why);
  if (!asksForToken) {
    asksForToken = true;
    show();
  }
  byId('token').focus();
}

api.whenTokenIsUnknown(hadOne => {
  api.setToken('');
  setText(byId('state'), '');
  byId('state').className = 'state';
  askForToken(hadOne ? 'This token is not accepted, or not any more.' : 'This gateway shows its state to those who have its token.');
});

byId('token-form').addEventListener('submit', event => {
  event.preventDefault();
  api.setToken(byId('token').value);
  byId('token').value = '';
  look();
});

byId('forget').addEventListener('click', () => {
  api.setToken('');
  askForToken('The token is forgotten here.');
  look();
});

// The status

async function look() {
  clearTimeout(timer);
  const mine = asking = {};
  let isRefused = false; // then the person has to do something first
  try {
    const status = await api.status();
    if (mine !== asking) return;
    answered();
    if (asksForToken) {
      asksForToken = false;
      show();
      byId('content').focus();
    }
    tell(status);
  } catch (error) {
    if (mine !== asking) return;
    isRefused = error instanceof api.Refused && error.status === 401;
    if (isRefused) answered();
    else silent(error);
  } finally {
    if (mine === asking && !isRefused && !document.hidden) timer = setTimeout(look, EVERY_MS);
  }
}

function tell(status) {
  setNow(status.now);
  setText(byId('authority'), status.authority ?? '');
  const state = byId('state');
  state.className = `state ${kindOf(status.state)}`;
  setText(state, `${signOf(status.state)} ${status.state}`);
  const since = moment(status.since);
  state.title = since.title;
  setText(byId('freshness'), since.text ? `since ${since.text.replace(/ ago$/, '')}` : '');
  byId('freshness').title = since.title;
  if (wanted() === 'status') statusScreen.tell(status);
  else if (wanted() === 'topics') topics.tell(status);
  statusScreen.tellNames(status);
}

function answered() {
  answeredAt = Date.now();
  setHidden(byId('silence'), true);
  document.body.classList.remove('stale');
}

function silent(error) {
  const refused = error instanceof api.Refused;
  const since = answeredAt ? `since ${new Date(answeredAt).toLocaleTimeString()} (${duration((Date.now() - answeredAt) / 1000)})` : 'so far';
  const last = answeredAt ? ' What is shown is older.' : '';
  setText(byId('silence'), `${refused ? `The gateway refuses: ${error.message}.` : `No answer ${since}.`}${last} It is asked again.`);
  setHidden(byId('silence'), false);
  document.body.classList.add('stale');
}

document.addEventListener('visibilitychange', () => {
  if (document.hidden) clearTimeout(timer);
  else look();
});
document.querySelector('.skip').addEventListener('click', event => {
  event.preventDefault(); // the part behind # names the screen
  byId('content').focus();
});
addEventListener('hashchange', () => { show(); look(); });

show();
look();
